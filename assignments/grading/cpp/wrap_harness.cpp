// Prints what a student's wrap() returns for the situation in the arguments.
#include <cstdio>
#include <exception>
#include <string>

#include "6-wrap/wrap.h"

int main(int argc, char** argv) {
  if (argc != 10) return 2;
  try {
    const assignment::Situation situation = {.ranks = std::stoi(argv[1]),
                                             .blocks = std::stoi(argv[2]),
                                             .block_parameters = std::stoll(argv[3]),
                                             .root_parameters = std::stoll(argv[4]),
                                             .forward_seconds = std::stod(argv[5]),
                                             .backward_seconds = std::stod(argv[6]),
                                             .latency = std::stod(argv[7]),
                                             .bytes_per_second = std::stod(argv[8]),
                                             .unsharded_bytes = std::stoll(argv[9])};
    std::printf("units:");
    for (const int size : assignment::wrap(situation)) std::printf(" %d", size);
    std::printf("\n");
    return 0;
  } catch (const std::exception& error) {
    std::printf("error: %s\n", error.what());
    return 1;
  }
}
