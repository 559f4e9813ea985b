#pragma once

#include <vector>

namespace tessera::tools {

/// The middle value, or the mean of the two middle ones; 0 if empty.
double median(std::vector<double> values);
/// The value that the fraction `part` (0 to 1) of the values lies below, or the nearest value; 0 if empty.
double percentile(std::vector<double> values, double part);
/// The value; a NaN, of which there are many, as the one that prints without a sign.
double unsigned_nan(double value);
/// Whether both contain the same numbers, bit for bit. All NaNs are equal: JSON can't represent their bits.
bool same_bits(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace tessera::tools
