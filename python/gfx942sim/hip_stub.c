/* A HIP runtime without a GPU: device memory is host memory, and a kernel launch is a call into Python.
 *
 * Only what FlyDSL's JIT runtime binds to is here. Anything asynchronous is done at once, so streams and events have
 * nothing to keep. A launch with no simulator behind it fails with hipErrorNoDevice: nothing runs unseen.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, NOT_FOUND = 500 };

typedef int (*launch_callback)(const void *image, const char *kernel, const unsigned *grid, const unsigned *block,
                               unsigned dynamic_lds, void **arguments, void **extra);
typedef void (*memory_callback)(void *start, size_t size, int is_free);

static launch_callback on_launch;
static memory_callback on_memory;
static int last_error;

struct function {
    const void *image;
    char name[];
};

void gfx942sim_set_callbacks(launch_callback launch, memory_callback memory) {
    on_launch = launch;
    on_memory = memory;
}

static int report(int error) {
    if (error) last_error = error;
    return error;
}

int hipModuleLoadData(void **module, const void *image) {
    *module = (void *)image;
    return SUCCESS;
}
int hipModuleUnload(void *module) { return SUCCESS; }

int hipModuleGetFunction(void **function, void *module, const char *name) {
    /* Kept for the life of the process: HIP has no call that gives a function back. */
    struct function *f = malloc(sizeof *f + strlen(name) + 1);
    if (!f) return report(OUT_OF_MEMORY);
    f->image = module;
    strcpy(f->name, name);
    *function = f;
    return SUCCESS;
}

int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned dynamic_lds, void *stream, void **arguments, void **extra) {
    struct function *f = function;
    unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
    if (!on_launch) return report(NO_DEVICE);
    return report(on_launch(f->image, f->name, grid, block, dynamic_lds, arguments, extra));
}

int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int block, size_t dynamic_lds) {
    *blocks = 1;
    return SUCCESS;
}

int hipMalloc(void **pointer, size_t size) {
    size_t rounded = (size + 255) / 256 * 256;
    if (!(*pointer = aligned_alloc(256, rounded ? rounded : 256))) return report(OUT_OF_MEMORY);
    if (on_memory && size) on_memory(*pointer, size, 0);
    return SUCCESS;
}
int hipFree(void *pointer) {
    if (on_memory && pointer) on_memory(pointer, 0, 1);
    free(pointer);
    return SUCCESS;
}

int hipMemcpy(void *to, const void *from, size_t size, int kind) {
    memcpy(to, from, size);
    return SUCCESS;
}
int hipMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    return hipMemcpy(to, from, size, kind);
}
int hipMemset(void *to, int value, size_t size) {
    memset(to, value, size);
    return SUCCESS;
}
int hipMemsetD16Async(void *to, unsigned short value, size_t count, void *stream) {
    for (size_t i = 0; i < count; i++) ((uint16_t *)to)[i] = value;
    return SUCCESS;
}
int hipMemsetD32Async(void *to, int value, size_t count, void *stream) {
    for (size_t i = 0; i < count; i++) ((int32_t *)to)[i] = value;
    return SUCCESS;
}
int hipHostRegister(void *pointer, size_t size, unsigned flags) { return SUCCESS; }
int hipHostUnregister(void *pointer) { return SUCCESS; }
int hipHostGetDevicePointer(void **device, void *host, unsigned flags) {
    *device = host;
    return SUCCESS;
}

int hipGetDevice(int *device) {
    *device = 0;
    return SUCCESS;
}
int hipSetDevice(int device) { return device == 0 ? SUCCESS : report(INVALID_VALUE); }
int hipGetDeviceCount(int *count) {
    *count = 1;
    return SUCCESS;
}
int hipDeviceSynchronize(void) { return SUCCESS; }

int hipStreamCreate(void **stream) {
    *stream = (void *)1;
    return SUCCESS;
}
int hipStreamDestroy(void *stream) { return SUCCESS; }
int hipStreamSynchronize(void *stream) { return SUCCESS; }
int hipStreamWaitEvent(void *stream, void *event, unsigned flags) { return SUCCESS; }
int hipEventCreateWithFlags(void **event, unsigned flags) {
    *event = (void *)1;
    return SUCCESS;
}
int hipEventDestroy(void *event) { return SUCCESS; }
int hipEventRecord(void *event, void *stream) { return SUCCESS; }
int hipEventSynchronize(void *event) { return SUCCESS; }

int hipGetLastError(void) {
    int error = last_error;
    last_error = SUCCESS;
    return error;
}
const char *hipGetErrorName(int error) {
    switch (error) {
        case SUCCESS: return "hipSuccess";
        case INVALID_VALUE: return "hipErrorInvalidValue";
        case OUT_OF_MEMORY: return "hipErrorOutOfMemory";
        case NO_DEVICE: return "hipErrorNoDevice (no simulated device is active)";
        case NOT_FOUND: return "hipErrorNotFound";
        default: return "hipErrorLaunchFailure (gfx942sim keeps the reason)";
    }
}
