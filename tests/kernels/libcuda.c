/* A CUDA driver without a GPU: it answers what Triton's host code asks, and hands on the parameters of launches. */

#include <stdint.h>

#define ANSWER(name, ...)                                                                                              \
    int name(__VA_ARGS__) { return 0; }

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned count;
} Config;

static void (*seen)(unsigned programs, unsigned threads, uintptr_t function, void **parameters);

/* Says what to call at each launch. */
void on_launch(void (*function)(unsigned, unsigned, uintptr_t, void **)) { seen = function; }

ANSWER(cuInit, unsigned flags)
ANSWER(cuCtxSetCurrent, void *context)
ANSWER(cuCtxGetLimit, uint64_t *value, int limit)
ANSWER(cuCtxSetLimit, int limit, uint64_t value)
ANSWER(cuFuncSetAttribute, void *function, int attribute, int value)
ANSWER(cuFuncSetCacheConfig, void *function, int config)
ANSWER(cuModuleUnload, void *module)

int cuGetErrorString(int error, const char **text) {
    *text = "an error of a driver without a GPU";
    return 0;
}

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) { return *device = 0; }

int cuCtxGetDevice(int *device) { return *device = 0; }

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = 1 << 17;
    return 0;
}

int cuCtxGetCurrent(void **context) {
    *context = &seen;
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { return cuCtxGetCurrent(context); }

int cuStreamIsCapturing(void *stream, int *status) { return *status = 0; }

/* Modules and functions are numbers. */
int cuModuleLoadData(uintptr_t *module, const void *image) {
    static uintptr_t count;
    *module = ++count;
    return 0;
}

int cuModuleGetFunction(uintptr_t *function, uintptr_t module, const char *name) {
    *function = module;
    return 0;
}

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : 0;
    return 0;
}

/* Memory of the host stands in for a GPU's. */
int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
    *(uint64_t *)value = pointer;
    return 0;
}

int cuPointerGetAttributes(unsigned count, int *attributes, void **values, uint64_t pointer) {
    return cuPointerGetAttribute(values[0], attributes[0], pointer);
}

int cuLaunchKernelEx(const Config *config, uintptr_t function, void **parameters, void **extra) {
    seen(config->grid[0], config->block[0], function, parameters);
    return 0;
}
