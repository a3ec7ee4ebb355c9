// Functions shared between the files and with Python. native.py declares the functions that Python calls.
#pragma once
#include "simd.h"

extern "C" {
void linear(const float* x, const float* w, const float* bias, float* y, long n, long in, long out, long threads);
void linear3(const float* x, const float* w0, const float* b0, float* y0, long out0, const float* w1, const float* b1,
             float* y1, long out1, const float* w2, const float* b2, float* y2, long out2, long n, long in,
             long threads);
void gated(const float* x, const float* gate, const float* up, const float* down, float* inner, float* y, long n,
           long in, long middle, long threads);
void rms_norm(const float* x, const float* weight, float offset, float eps, float* y, long n, long size);
void rotate_and_store(float* q, const float* k, const float* v, const float* cos, const float* sin,
                      const int64_t* slots, float* keys, float* values, long row_step, long head_step, long batch,
                      long n, long heads, long kv_heads, long size);
void attend(const float* q, long q_row, long q_head, long q_step, const float* keys, long k_row, long k_head,
            const float* values, long v_row, long v_head, const float* mask, long mask_row, long mask_step, float* out,
            long batch, long heads, long kv_heads, long n, long slots, long size, float scale, long threads);
}
