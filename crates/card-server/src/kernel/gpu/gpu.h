// What kernels of a GPU need of their compiler: nvcc, clang without a CUDA toolkit, or a compiler for the host's processor.
//
// A kernel distributes its work over the blocks and threads that it finds: BLOCK of BLOCKS, THREAD of THREADS. One thread is
// enough; tests run kernels so on the processor.

#ifndef MILLSTREAM_GPU_H
#define MILLSTREAM_GPU_H

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if defined(__CUDA__) && defined(__clang__)
#define KERNEL extern "C" __attribute__((global))
#define DEVICE static inline __attribute__((device))
#define BLOCK __nvvm_read_ptx_sreg_ctaid_x()
#define BLOCKS __nvvm_read_ptx_sreg_nctaid_x()
#define THREAD __nvvm_read_ptx_sreg_tid_x()
#define THREADS __nvvm_read_ptx_sreg_ntid_x()
DEVICE void atomic_xor(u32 *word, u32 value) { __nvvm_atom_xor_gen_i((int *)word, (int)value); }
DEVICE void atomic_or(u32 *word, u32 value) { __nvvm_atom_or_gen_i((int *)word, (int)value); }
DEVICE void atomic_add(u32 *word, u32 value) { __nvvm_atom_add_gen_i((int *)word, (int)value); }
DEVICE void atomic_min(u32 *word, u32 value) { __nvvm_atom_min_gen_ui(word, value); }
#elif defined(__CUDACC__)
#define KERNEL extern "C" __global__
#define DEVICE static inline __device__
#define BLOCK blockIdx.x
#define BLOCKS gridDim.x
#define THREAD threadIdx.x
#define THREADS blockDim.x
DEVICE void atomic_xor(u32 *word, u32 value) { atomicXor(word, value); }
DEVICE void atomic_or(u32 *word, u32 value) { atomicOr(word, value); }
DEVICE void atomic_add(u32 *word, u32 value) { atomicAdd(word, value); }
DEVICE void atomic_min(u32 *word, u32 value) { atomicMin(word, value); }
#else
#define KERNEL
#define DEVICE static inline
enum { BLOCK = 0, BLOCKS = 1, THREAD = 0, THREADS = 1 };
DEVICE void atomic_xor(u32 *word, u32 value) { *word ^= value; }
DEVICE void atomic_or(u32 *word, u32 value) { *word |= value; }
DEVICE void atomic_add(u32 *word, u32 value) { *word += value; }
DEVICE void atomic_min(u32 *word, u32 value) { *word = *word < value ? *word : value; }
#endif

#endif
