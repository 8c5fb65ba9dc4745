/* A CUDA driver for machines without a GPU: device memory is a memfd, which also serves as its dma-buf. It has one device
 * of 1 GiB and implements only the calls that cards make, with the rules of the Driver API reference. A context must be
 * current. Sizes and addresses of exports are whole pages. Device addresses are not host pointers. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };
enum { PAGE = 4096, DEVICES = 1, DMA_BUF_SUPPORTED = 124, SYNC_MEMOPS = 6, DMA_BUF_FD = 1 };

static const uint64_t BASE = 0x7f0000000000;
static const size_t ALL = (size_t)1 << 30;
static int initialised, retained, context;
static _Thread_local void *current;
static int memory = -1;
static char *bytes;
static size_t size;

static char *at(uint64_t address, size_t len) {
    if (!bytes || address < BASE || len > size || address - BASE > size - len) return NULL;
    return bytes + (address - BASE);
}

int cuInit(unsigned flags) { return initialised = 1, flags ? INVALID_VALUE : OK; }
int cuDeviceGetCount(int *count) { return initialised ? (*count = DEVICES, OK) : NOT_INITIALIZED; }
int cuDeviceGet(int *device, int index) {
    if (index < 0 || index >= DEVICES) return INVALID_DEVICE;
    return *device = index, OK;
}
int cuDeviceGetName(char *name, int len, int device) { return strncpy(name, "Memory file", (size_t)len), device; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return *value = attribute == DMA_BUF_SUPPORTED, device;
}
int cuDevicePrimaryCtxRetain(void **handle, int device) { return retained++, *handle = &context, device; }
int cuDevicePrimaryCtxRelease_v2(int device) { return retained--, device; }
int cuCtxSetCurrent(void *handle) { return current = handle, OK; }
int cuCtxSynchronize(void) { return current ? OK : INVALID_CONTEXT; }
int cuMemAlloc_v2(uint64_t *address, size_t len) {
    if (!current || !retained) return INVALID_CONTEXT;
    if (bytes || len > ALL) return OUT_OF_MEMORY;
    memory = memfd_create("device memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memory < 0 || ftruncate(memory, (off_t)len)) return OUT_OF_MEMORY;
    bytes = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (bytes == MAP_FAILED) return bytes = NULL, OUT_OF_MEMORY;
    /* Allocated memory holds the data of its last user. */
    memset(bytes, 0xaa, len);
    return size = len, *address = BASE, OK;
}
int cuMemFree_v2(uint64_t address) {
    if (address != BASE || !bytes) return INVALID_VALUE;
    return munmap(bytes, size), close(memory), bytes = NULL, OK;
}
int cuPointerSetAttribute(const void *value, int attribute, uint64_t address) {
    return attribute == SYNC_MEMOPS && *(const int *)value == 1 && at(address, 1) ? OK : INVALID_VALUE;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t len) {
    if (!current) return INVALID_CONTEXT;
    return at(from, len) ? (memcpy(to, at(from, len), len), OK) : INVALID_VALUE;
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t len) {
    if (!current) return INVALID_CONTEXT;
    return at(to, len) ? (memcpy(at(to, len), from, len), OK) : INVALID_VALUE;
}
int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t len) {
    if (!current) return INVALID_CONTEXT;
    if (!at(to, len) || !at(from, len) || (to < from ? from - to : to - from) < len) return INVALID_VALUE;
    return memcpy(at(to, len), at(from, len), len), OK;
}
int cuMemsetD8_v2(uint64_t to, unsigned char value, size_t len) {
    if (!current) return INVALID_CONTEXT;
    return at(to, len) ? (memset(at(to, len), value, len), OK) : INVALID_VALUE;
}
int cuMemGetHandleForAddressRange(void *handle, uint64_t address, size_t len, int type, unsigned long long flags) {
    if (type != DMA_BUF_FD || flags || address % PAGE || len % PAGE || !at(address, len)) return INVALID_VALUE;
    *(int *)handle = dup(memory);
    return OK;
}
int cuGetErrorName(int code, const char **name) {
    switch (code) {
    case INVALID_VALUE: return *name = "CUDA_ERROR_INVALID_VALUE", OK;
    case OUT_OF_MEMORY: return *name = "CUDA_ERROR_OUT_OF_MEMORY", OK;
    case INVALID_CONTEXT: return *name = "CUDA_ERROR_INVALID_CONTEXT", OK;
    default: return INVALID_VALUE;
    }
}
