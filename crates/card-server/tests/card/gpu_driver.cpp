/* The drivers of a GPU, CUDA's and Vulkan's, for machines without one. Device memory is a memfd, which is also its dma-buf and
 * its opaque descriptor. There is one device, which allocates at most 1 GiB at a time. Only the calls that cards make are
 * implemented, with the rules of the two references. A context must be current. Sizes and addresses of exports are whole
 * pages. Device addresses are not host pointers. Kernels run on the processor, as a single thread, when they are launched:
 * those of EVENTS, the example FUNCTION for events, `double_words` of the self-test, and `endless`, after which its stream is
 * never ready again. Only work in other non-blocking streams goes on then. */
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include EVENTS
#include FUNCTION

namespace {

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };
enum { INVALID_PTX = 218, NOT_FOUND = 500, NOT_READY = 600 };
enum { PAGE = 4096, DEVICES = 1, MULTIPROCESSORS = 16, DMA_BUF_SUPPORTED = 124, SYNC_MEMOPS = 6, DMA_BUF_FD = 1 };
enum { MAPPINGS = 64, OPAQUE_FD = 1 };

const uint64_t BASE = 0x7f0000000000, STRIDE = 1ull << 34;
const size_t ALL = (size_t)1 << 30;
const char UUID[17] = "soft-gpu-for-tst";
int initialised, retained, context;
thread_local void *current;

struct Allocation {
    int fd;
    char *bytes;
    size_t size;
    bool is_mapped;
} allocations[MAPPINGS];
std::recursive_mutex lock;
using Guard = std::lock_guard<std::recursive_mutex>;

Allocation *find(uint64_t address) {
    Guard guard(lock);
    if (address < BASE || (address - BASE) / STRIDE >= MAPPINGS) return nullptr;
    Allocation *found = &allocations[(address - BASE) / STRIDE];
    return found->is_mapped ? found : nullptr;
}

char *at(uint64_t address, size_t len) {
    Allocation *found = find(address);
    uint64_t offset = (address - BASE) % STRIDE;
    return found && len <= found->size && offset <= found->size - len ? found->bytes + offset : nullptr;
}

int add(int fd, size_t len, uint64_t *address) {
    Guard guard(lock);
    for (int index = 0; index < MAPPINGS; index++) {
        Allocation *entry = &allocations[index];
        if (entry->is_mapped) continue;
        void *bytes = mmap(nullptr, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (bytes == MAP_FAILED) return OUT_OF_MEMORY;
        *entry = {fd, (char *)bytes, len, true};
        *address = BASE + index * STRIDE;
        return OK;
    }
    return OUT_OF_MEMORY;
}

int create(size_t len) {
    int fd = len <= ALL ? memfd_create("device memory", MFD_CLOEXEC | MFD_ALLOW_SEALING) : -1;
    if (fd >= 0 && ftruncate(fd, (off_t)len)) close(fd), fd = -1;
    return fd;
}

void double_words(char *memory, uint64_t bytes, const uint64_t *arguments, uint64_t *results) {
    uint64_t *words = (uint64_t *)(memory + arguments[0]);
    if (arguments[0] + 8 * arguments[1] > bytes) return;
    for (uint64_t word = 0; word < arguments[1]; word++) results[0] += words[word] *= 2;
}

/* A kernel, and which of its parameters are addresses. */
struct Entry {
    const char *name;
    unsigned parameters, addresses;
} entries[] = {{"fragment_checksums", 4, 0b1011}, {"cluster7", 9, 0b111100111}, {"double_words", 4, 0b1101},
             {"decide_events", 7, 0b1100011}, {"endless", 4, 0b1101}};

void call(const Entry *entry, uint64_t *p) {
    if (entry == &entries[0])
        fragment_checksums((const u8 *)p[0], (const Fragment *)p[1], p[2], (u32 *)p[3]);
    else if (entry == &entries[1])
        cluster7((const u8 *)p[0], (const short *)p[1], (const Event *)p[2], p[3], p[4], (const u32 *)p[5],
                 (const u32 *)p[6], (u8 *)p[7], (Result *)p[8]);
    else if (entry == &entries[3])
        decide_events((const u8 *)p[0], (const EventRow *)p[1], p[2], p[3], p[4], (const u64 *)p[5], (u32 *)p[6]);
    else if (entry == &entries[2])
        double_words((char *)p[0], p[1], (const uint64_t *)p[2], (uint64_t *)p[3]);
}

} // namespace

extern "C" {

int cuInit(unsigned flags) { return initialised = 1, flags ? INVALID_VALUE : OK; }
int cuDeviceGetCount(int *count) { return initialised ? (*count = DEVICES, OK) : NOT_INITIALIZED; }
int cuDeviceGet(int *device, int index) {
    if (index < 0 || index >= DEVICES) return INVALID_DEVICE;
    return *device = index, OK;
}
int cuDeviceGetName(char *name, int len, int device) { return strncpy(name, "Memory file", (size_t)len), device; }
int cuDeviceGetUuid(char *uuid, int device) { return memcpy(uuid, UUID, 16), device; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return *value = attribute == DMA_BUF_SUPPORTED || attribute == MULTIPROCESSORS, device;
}
int cuDevicePrimaryCtxRetain(void **handle, int device) { return __atomic_fetch_add(&retained, 1, __ATOMIC_RELAXED), *handle = &context, device; }
int cuDevicePrimaryCtxRelease_v2(int device) { return __atomic_fetch_sub(&retained, 1, __ATOMIC_RELAXED), device; }
int cuCtxSetCurrent(void *handle) { return current = handle, OK; }
int cuMemAlloc_v2(uint64_t *address, size_t len) {
    if (!current || !retained) return INVALID_CONTEXT;
    int fd = create(len);
    if (fd < 0 || add(fd, len, address)) return OUT_OF_MEMORY;
    /* Allocated memory holds the data of its last user. */
    memset(at(*address, len), 0xaa, len);
    return OK;
}
int cuMemFree_v2(uint64_t address) {
    Guard guard(lock);
    Allocation *found = find(address);
    if (!found || (address - BASE) % STRIDE) return INVALID_VALUE;
    found->is_mapped = false;
    return munmap(found->bytes, found->size), close(found->fd), OK;
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
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t len, int *stream) {
    if (!current) return INVALID_CONTEXT;
    if (!stream || !at(to, len) || !at(from, len) || (to < from ? from - to : to - from) < len) return INVALID_VALUE;
    return memcpy(at(to, len), at(from, len), len), OK;
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t len, int *stream) {
    if (!current) return INVALID_CONTEXT;
    return stream && at(to, len) ? (memset(at(to, len), value, len), OK) : INVALID_VALUE;
}
int cuMemGetHandleForAddressRange(void *handle, uint64_t address, size_t len, int type, unsigned long long flags) {
    if (type != DMA_BUF_FD || flags || address % PAGE || len % PAGE || !at(address, len)) return INVALID_VALUE;
    *(int *)handle = dup(find(address)->fd);
    return OK;
}

struct ExternalHandle {
    int type;
    union {
        int fd;
        void *others[2];
    };
    unsigned long long size;
};
int cuImportExternalMemory(ExternalHandle **memory, const ExternalHandle *handle) {
    struct stat file;
    if (!current || handle->type != OPAQUE_FD || fstat(handle->fd, &file) || (uint64_t)file.st_size != handle->size)
        return INVALID_VALUE;
    return *memory = new ExternalHandle(*handle), OK;
}
int cuExternalMemoryGetMappedBuffer(uint64_t *address, ExternalHandle *memory, const unsigned long long *buffer) {
    if (buffer[0] || buffer[1] != memory->size) return INVALID_VALUE;
    return add(dup(memory->fd), memory->size, address);
}
int cuDestroyExternalMemory(ExternalHandle *memory) { return close(memory->fd), delete memory, OK; }

int cuModuleLoadData(std::string **module, const char *text) {
    if (!current) return INVALID_CONTEXT;
    if (!strstr(text, ".version") || !strstr(text, ".entry")) return INVALID_PTX;
    return *module = new std::string(text), OK;
}
int cuModuleUnload(std::string *module) { return delete module, OK; }
int cuModuleGetFunction(const Entry **function, std::string *module, const char *name) {
    if (module->find(std::string(".entry ") + name + "(") == std::string::npos) return NOT_FOUND;
    for (const Entry &entry : entries)
        if (!strcmp(entry.name, name)) return *function = &entry, OK;
    return NOT_FOUND;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const Entry *, int threads, size_t) {
    return *blocks = 2048 / threads, OK;
}
int cuStreamCreate(int **stream, unsigned flags) { return *stream = new int(0), flags == 1 ? OK : INVALID_VALUE; }
int cuStreamDestroy_v2(int *stream) { return delete stream, OK; }
int cuStreamQuery(int *stream) { return *stream; }
int cuStreamSynchronize(int *stream) { return *stream; }
int cuLaunchKernel(const Entry *function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                   int *stream, void **parameters, void **) {
    if (!current || !blocks || !threads || !stream) return INVALID_VALUE;
    uint64_t words[16];
    for (unsigned index = 0; index < function->parameters; index++) {
        words[index] = *(uint64_t *)parameters[index];
        if (!(function->addresses >> index & 1)) continue;
        char *address = at(words[index], 0);
        if (!address) return INVALID_VALUE;
        words[index] = (uint64_t)address;
    }
    if (!strcmp(function->name, "endless")) *stream = NOT_READY;
    return call(function, words), OK;
}
int cuGetErrorName(int code, const char **name) {
    switch (code) {
    case INVALID_VALUE: return *name = "CUDA_ERROR_INVALID_VALUE", OK;
    case OUT_OF_MEMORY: return *name = "CUDA_ERROR_OUT_OF_MEMORY", OK;
    case INVALID_CONTEXT: return *name = "CUDA_ERROR_INVALID_CONTEXT", OK;
    case INVALID_PTX: return *name = "CUDA_ERROR_INVALID_PTX", OK;
    case NOT_FOUND: return *name = "CUDA_ERROR_NOT_FOUND", OK;
    case NOT_READY: return *name = "CUDA_ERROR_NOT_READY", OK;
    default: return INVALID_VALUE;
    }
}

/* Vulkan, with the values and layouts of its registry. */

enum { VK_OUT_OF_DEVICE_MEMORY = -2, VK_INVALID_HANDLE = -1000072003 };
enum { VK_DEVICE_ID = 1000071004, VK_IMPORT_FD = 1000074000 };

struct Structure {
    uint32_t type;
    Structure *next;
};
struct MemoryProperties {
    uint32_t type_count, types[32][2], heap_count;
    struct {
        uint64_t size;
        uint32_t flags;
    } heaps[16];
};
struct DeviceMemory {
    int fd;
    size_t size;
    void *mapped;
};

static int create_instance(const void *, const void *, void **instance) { return *instance = &context, 0; }
static void destroy(void *, const void *) {}
static int physical_devices(void *, uint32_t *count, void **devices) {
    if (devices) devices[0] = &context;
    return *count = 1, 0;
}
static void properties2(void *, Structure *properties) {
    for (Structure *next = properties->next; next; next = next->next)
        if (next->type == VK_DEVICE_ID) memcpy(next + 1, UUID, 16);
}
static void properties(void *, void *) {}
static void memory_properties(void *, MemoryProperties *out) {
    memset(out, 0, sizeof *out);
    /* Host memory, device memory, and device memory that the host sees. */
    out->type_count = 3;
    uint32_t types[3][2] = {{0xe, 1}, {1, 0}, {7, 0}};
    memcpy(out->types, types, sizeof types);
    out->heap_count = 2;
    out->heaps[0] = {ALL, 1};
    out->heaps[1] = {ALL, 0};
}
static int create_device(void *, const void *, const void *, void **device) { return *device = &context, 0; }
struct AllocateInfo {
    Structure head;
    uint64_t size;
    uint32_t type;
};
struct ImportInfo {
    Structure head;
    uint32_t handle_type;
    int fd;
};
static int allocate_memory(void *, const AllocateInfo *info, const void *, DeviceMemory **memory) {
    if (info->type != 2) return VK_OUT_OF_DEVICE_MEMORY;
    int fd = -1;
    for (Structure *next = info->head.next; next; next = next->next)
        if (next->type == VK_IMPORT_FD) {
            struct stat file;
            fd = ((ImportInfo *)next)->fd;
            if (fstat(fd, &file) || (uint64_t)file.st_size != info->size) return VK_INVALID_HANDLE;
        }
    if (fd < 0) fd = create(info->size);
    if (fd < 0) return VK_OUT_OF_DEVICE_MEMORY;
    return *memory = new DeviceMemory{fd, info->size, nullptr}, 0;
}
static int map_memory(void *, DeviceMemory *memory, uint64_t, uint64_t, uint32_t, void **address) {
    void *mapped = mmap(nullptr, memory->size, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
    if (mapped == MAP_FAILED) return VK_OUT_OF_DEVICE_MEMORY;
    return *address = memory->mapped = mapped, 0;
}
static void free_memory(void *, DeviceMemory *memory, const void *) {
    if (memory->mapped) munmap(memory->mapped, memory->size);
    close(memory->fd);
    delete memory;
}
struct GetFdInfo {
    Structure head;
    DeviceMemory *memory;
    uint32_t handle_type;
};
static int memory_fd(void *, const GetFdInfo *info, int *fd) { return *fd = dup(info->memory->fd), 0; }

void *vkGetInstanceProcAddr(void *instance, const char *name);
static void *device_function(void *device, const char *name) { return vkGetInstanceProcAddr(device, name); }
void *vkGetInstanceProcAddr(void *, const char *name) {
    static const struct {
        const char *name;
        void *function;
    } functions[] = {
        {"vkCreateInstance", (void *)create_instance},
        {"vkDestroyInstance", (void *)destroy},
        {"vkEnumeratePhysicalDevices", (void *)physical_devices},
        {"vkGetPhysicalDeviceProperties", (void *)properties},
        {"vkGetPhysicalDeviceProperties2", (void *)properties2},
        {"vkGetPhysicalDeviceMemoryProperties", (void *)memory_properties},
        {"vkCreateDevice", (void *)create_device},
        {"vkGetDeviceProcAddr", (void *)device_function},
        {"vkDestroyDevice", (void *)destroy},
        {"vkAllocateMemory", (void *)allocate_memory},
        {"vkFreeMemory", (void *)free_memory},
        {"vkMapMemory", (void *)map_memory},
        {"vkGetMemoryFdKHR", (void *)memory_fd},
    };
    for (const auto &known : functions)
        if (!strcmp(known.name, name)) return known.function;
    return nullptr;
}

} // extern "C"
