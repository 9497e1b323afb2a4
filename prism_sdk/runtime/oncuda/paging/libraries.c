/* Finds the libraries below this one, and asks the management library what it knows.
 *
 * Responsible for libcudart, libcuda and libnvidia-ml as far as somebody else has loaded or installed them; nothing here
 * opens a device.
 */
#define _GNU_SOURCE
#include "pages.h"

#include <dlfcn.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_OVERHEAD ((uint64_t)1 << 30)  /* of a context; it takes about half of that */

Driver driver;

static pthread_once_t found_runtime = PTHREAD_ONCE_INIT;
static void *runtime; /* handle of libcudart */

static int is_runtime(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    const char *name = strrchr(info->dlpi_name, '/');
    if (strncmp(name ? name + 1 : info->dlpi_name, "libcudart.so", 12) != 0) return 0;
    *(const char **)data = info->dlpi_name;
    return 1;
}

static void find_runtime(void) {
    const char *name = NULL;
    dl_iterate_phdr(is_runtime, &name);
    if (name) runtime = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
}

void *runtime_function(const char *symbol) {
    pthread_once(&found_runtime, find_runtime);
    return runtime ? dlsym(runtime, symbol) : NULL;
}

int load_driver(void) {
    static int loaded; /* under alloc_lock or before there is a second thread */
    if (loaded) return loaded > 0;
    loaded = -1;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return 0;
#define FIND(name, symbol, arguments)                                                                                  \
    driver.name = (CUresult(*) arguments)dlsym(library, #symbol);                                                      \
    if (!driver.name) return 0;
    DRIVER_FUNCTIONS(FIND)
#undef FIND
    loaded = 1;
    return 1;
}

/* NVIDIA's management library says what devices use before this process has opened them; source: nvml.h. */
#define MAX_DEVICES 64
static uint64_t used_before[MAX_DEVICES]; /* by the library's numbers */

typedef struct {
    unsigned long long total, free, used;
} NvmlMemory;

static void *management(void) {
    static void *library;
    static int asked; /* once, at the start */
    if (asked) return library;
    asked = 1;
    void *found = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    int (*init)(void) = found ? (int (*)(void))dlsym(found, "nvmlInit_v2") : NULL;
    if (init && !init()) library = found;
    return library;
}

static uint64_t used_by_all(void *handle) {
    int (*info)(void *, NvmlMemory *) = (int (*)(void *, NvmlMemory *))dlsym(management(), "nvmlDeviceGetMemoryInfo");
    NvmlMemory memory;
    return info && !info(handle, &memory) ? memory.used : 0;
}

void look_at_all(void) {
    if (!management()) return;
    int (*by_index)(unsigned, void **) =
        (int (*)(unsigned, void **))dlsym(management(), "nvmlDeviceGetHandleByIndex_v2");
    void *handle;
    for (unsigned i = 0; by_index && i < MAX_DEVICES && !by_index(i, &handle); i++) used_before[i] = used_by_all(handle);
}

typedef struct { /* nvmlProcessInfo_t */
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} NvmlProcess;

_Static_assert(sizeof(NvmlProcess) == 24, "nvmlProcessInfo_t has 24 bytes");

/* What this process has on a device, by the library's list; 0 where it is not in it, as in some containers. */
static uint64_t used_by_us(void *handle) {
    int (*list)(void *, unsigned *, NvmlProcess *) = (int (*)(void *, unsigned *, NvmlProcess *))dlsym(
        management(), "nvmlDeviceGetComputeRunningProcesses_v3");
    enum { MANY = 1024 };
    NvmlProcess *processes = calloc(MANY, sizeof *processes);
    unsigned num = MANY;
    uint64_t used = 0;
    if (list && processes && !list(handle, &num, processes))
        for (unsigned i = 0; i < num && i < MANY; i++)
            if (processes[i].pid == (unsigned)getpid()) used = processes[i].used;
    free(processes);
    return used;
}

/* What a context takes that was just made: by how much the device's use grew since this process began.  Where others
 * began meanwhile, by the list, which is some MiB off; 0 where nobody can tell. */
uint64_t cost_of_context(CUdevice device) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *handle;
    if (!management() || !cuda) return 0;
    int (*bus)(char *, int, CUdevice) = (int (*)(char *, int, CUdevice))dlsym(cuda, "cuDeviceGetPCIBusId");
    int (*by_bus)(const char *, void **) =
        (int (*)(const char *, void **))dlsym(management(), "nvmlDeviceGetHandleByPciBusId_v2");
    int (*index_of)(void *, unsigned *) = (int (*)(void *, unsigned *))dlsym(management(), "nvmlDeviceGetIndex");
    char name[64];
    unsigned index;
    if (!bus || !by_bus || !index_of || bus(name, sizeof name, device) || by_bus(name, &handle)) return 0;
    if (!index_of(handle, &index) && index < MAX_DEVICES && used_before[index]) {
        uint64_t used = used_by_all(handle);
        if (used > used_before[index] && used - used_before[index] < MOST_OVERHEAD) return used - used_before[index];
    }
    uint64_t ours = used_by_us(handle);
    return ours < MOST_OVERHEAD ? ours : 0; /* a value that is not available is the largest of all */
}
