#pragma once

#include <vector>

namespace tessera::tools {

/// The one in the middle, or the mean of the two that are; 0 of none.
double median(std::vector<double> values);
/// That which `part` (0 to 1) of them are below; the nearest there is, 0 of none.
double percentile(std::vector<double> values, double part);
/// Whether both hold the same numbers, bit for bit. One NaN equals any other: JSON has no words for their bits.
bool same_bits(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace tessera::tools
