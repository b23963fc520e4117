// Matrices of floats, and their three products. Inner loops run along rows, so compilers vectorise
// them, and no product skips zeros: its time does not depend on the numbers.
#pragma once

#include <cstddef>
#include <vector>

struct Matrix {
  std::size_t rows = 0, columns = 0;
  std::vector<float> values;

  Matrix() = default;
  Matrix(std::size_t rows, std::size_t columns)
      : rows(rows), columns(columns), values(rows * columns) {}

  float* row(std::size_t i) { return values.data() + i * columns; }
  const float* row(std::size_t i) const { return values.data() + i * columns; }
};

// into += a · b
inline void add_product(const Matrix& a, const Matrix& b, Matrix& into) {
  for (std::size_t i = 0; i < a.rows; ++i)
    for (std::size_t k = 0; k < a.columns; ++k) {
      const float factor = a.row(i)[k];
      const float* __restrict from = b.row(k);
      float* __restrict to = into.row(i);
      for (std::size_t j = 0; j < b.columns; ++j) to[j] += factor * from[j];
    }
}

// into += aᵀ · b
inline void add_transposed_product(const Matrix& a, const Matrix& b, Matrix& into) {
  for (std::size_t i = 0; i < a.rows; ++i)
    for (std::size_t k = 0; k < a.columns; ++k) {
      const float factor = a.row(i)[k];
      const float* __restrict from = b.row(i);
      float* __restrict to = into.row(k);
      for (std::size_t j = 0; j < b.columns; ++j) to[j] += factor * from[j];
    }
}

inline Matrix transposed(const Matrix& a) {
  Matrix found(a.columns, a.rows);
  for (std::size_t i = 0; i < a.rows; ++i)
    for (std::size_t j = 0; j < a.columns; ++j) found.row(j)[i] = a.row(i)[j];
  return found;
}
