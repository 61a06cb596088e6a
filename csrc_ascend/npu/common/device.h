// Shared by the device code of all kernels: rounding, parameters, and matrix-vector products on the vector
// unit. Device code: no exceptions, no recursion, no virtual functions, no double.
#pragma once

#include "kernel_operator.h"

namespace ascend_npu {

using namespace AscendC;

constexpr int32_t kLanes = 64;      // floats that one repeat of an instruction computes
constexpr int32_t kBlockLanes = 8;  // floats of a 32-byte block

__aicore__ inline int32_t ceil_div(int32_t value, int32_t unit) { return (value + unit - 1) / unit; }
__aicore__ inline int32_t round_up(int32_t value, int32_t unit) { return ceil_div(value, unit) * unit; }
__aicore__ inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
__aicore__ inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

// Reads the parameters that op_host put into global memory: a plain struct of 32-bit fields.
template <class Params>
__aicore__ inline void read_params(Params& params, GM_ADDR tiling) {
  GlobalTensor<int32_t> words;
  words.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(tiling), sizeof(Params) / sizeof(int32_t));
  int32_t* target = reinterpret_cast<int32_t*>(&params);
  for (uint32_t index = 0; index < sizeof(Params) / sizeof(int32_t); ++index)
    target[index] = words.GetValue(index);
}

template <class T>
__aicore__ inline GlobalTensor<T> global(GM_ADDR address) {
  GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(address));
  return tensor;
}

// Makes earlier writes of the vector unit visible to later scalar reads.
__aicore__ inline void scalar_after_vector() {
  SetFlag<HardEvent::V_S>(EVENT_ID0);
  WaitFlag<HardEvent::V_S>(EVENT_ID0);
}

__aicore__ inline void vector_after_scalar() {
  SetFlag<HardEvent::S_V>(EVENT_ID0);
  WaitFlag<HardEvent::S_V>(EVENT_ID0);
}

// products[r][l] = sum over chunks c of matrix[r][64 c + l] * vector[64 c + l], added to what is there unless
// `is_first`. products: [rows][64], of which a first chunk narrower than 64 leaves the rest alone; matrix:
// [rows][width]; width: a multiple of 8; rows: 255 at most.
__aicore__ inline void multiply_rows(const LocalTensor<float>& products, const LocalTensor<float>& matrix,
                                     const LocalTensor<float>& vector, int32_t rows, int32_t width,
                                     bool is_first) {
  for (int32_t begin = 0; begin < width; begin += kLanes) {
    const int32_t lanes = smaller(kLanes, width - begin);
    const BinaryRepeatParams strides(1, 1, 1, kLanes / kBlockLanes, width / kBlockLanes, 0);
    if (is_first && begin == 0)
      Mul(products, matrix, vector, lanes, rows, strides);
    else
      MulAddDst(products, matrix[begin], vector[begin], lanes, rows, strides);
    PipeBarrier<PIPE_V>();
  }
}

// sums[r] = the dot product of row r of the matrix with the vector; products: room for [rows][64].
__aicore__ inline void dot_rows(const LocalTensor<float>& sums, const LocalTensor<float>& products,
                                const LocalTensor<float>& matrix, const LocalTensor<float>& vector,
                                int32_t rows, int32_t width) {
  multiply_rows(products, matrix, vector, rows, width, true);
  WholeReduceSum(sums, products, smaller(width, kLanes), rows, 1, 1, kLanes / kBlockLanes);
  PipeBarrier<PIPE_V>();
}

// matrix[r][d] /= factors[r]. factors: [rows][8], each factor eight times.
__aicore__ inline void divide_rows(const LocalTensor<float>& matrix, const LocalTensor<float>& factors,
                                   int32_t rows, int32_t width) {
  for (int32_t begin = 0; begin < width; begin += kLanes) {
    const int32_t lanes = smaller(kLanes, width - begin);
    Div(matrix[begin], matrix[begin], factors, lanes, rows,
        BinaryRepeatParams(1, 1, 0, width / kBlockLanes, width / kBlockLanes, 1));
  }
  PipeBarrier<PIPE_V>();
}

}  // namespace ascend_npu
