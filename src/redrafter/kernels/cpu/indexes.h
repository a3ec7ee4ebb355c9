// Indexes from outside. Each becomes an address, so a function checks all of them before it runs.
#pragma once
#include <cstdint>

// What a function with indexes returns. Unless DONE, nothing was run.
enum Checked { OUTSIDE_TENSOR = -1, OUTSIDE_VOCABULARY = 0, DONE = 1 };

// Whether all indexes (count,) are in 0 to end - 1.
static inline bool inside(const int64_t* index, long count, long end) {
  for (long i = 0; i < count; i++)
    if (index[i] < 0 || index[i] >= end) return false;
  return true;
}
