// Which rows operations read and write, the same for every device: rows of activations are tokens, one after the other.
#pragma once
#include <cstdint>
#include "llmc/base/host_device.h"
#include "llmc/ops/precision.h"

// The position of each row's token in its sequence.
struct RowPositions {
  int64_t T = 1;                // sequences of T rows, each from position `first` on,
  const int* of_row = nullptr;  // or, if this is not null, each row's position, on the device
  int64_t first = 0;

  SLA_HOST_DEVICE int64_t operator[](int64_t row) const { return of_row != nullptr ? of_row[row] : first + row % T; }
};

// A copy of rows of `width` elements, or zeros where src is null. Row i goes to row i of dst, or, if dst_rows is
// not null, to row dst_rows[i * dst_rows_stride]; dst_rows is on the device.
struct RowCopy {
  floatX* dst;
  int64_t dst_stride;
  const floatX* src;
  int64_t src_stride, width;
  const int* dst_rows = nullptr;
  int64_t dst_rows_stride = 1;

  SLA_HOST_DEVICE floatX* to(int64_t row) const {
    return dst + (dst_rows != nullptr ? int64_t(dst_rows[row * dst_rows_stride]) : row) * dst_stride;
  }
};

// The keys of a sequence, beside which rows of k and v there are others: T rows from `first_row` on.
struct KeyRows {
  int first_row, T;
};
