// Remarks for the compiler on loops over arrays.
#pragma once

// Before a loop: no iteration depends on another. GCC then vectorizes it without asking whether the arrays overlap;
// clang has no such remark that is silent where it doesn't vectorize, and asks at run time.
#if defined(__GNUC__) && !defined(__clang__)
#define TESSERA_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#else
#define TESSERA_INDEPENDENT_ITERATIONS
#endif
