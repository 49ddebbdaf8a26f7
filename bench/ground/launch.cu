// SPDX-License-Identifier: Apache-2.0
// What one launch costs under each way to see it: empty kernels, timed on the CPU in interleaved blocks
// within one process. One line of JSON.
//
//   launch WINDOWS_SO CUPTI_PATH ROUNDS
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <link.h>
#include <linux/perf_event.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

__global__ void nothing(int *p) {
    if (p) *p = 1;
}

static double now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static double block(int batches) {  // ns a launch; the queue is never full
    double in = 0;
    for (int b = 0; b < batches; b++) {
        double t = now_ns();
        for (int i = 0; i < 200; i++) nothing<<<1, 32>>>(nullptr);
        in += now_ns() - t;
        cudaDeviceSynchronize();
    }
    return in / batches / 200;
}

static uint64_t file_offset(void *at, std::string *path) {
    Dl_info d;
    link_map *m = nullptr;
    if (!dladdr1(at, &d, (void **)&m, RTLD_DL_LINKMAP)) return 0;
    *path = d.dli_fname;
    uint64_t v = (char *)at - (char *)d.dli_fbase;
    auto *e = (ElfW(Ehdr) *)d.dli_fbase;
    auto *p = (ElfW(Phdr) *)((char *)d.dli_fbase + e->e_phoff);
    for (int i = 0; i < e->e_phnum; i++)
        if (p[i].p_type == PT_LOAD && v >= p[i].p_vaddr && v < p[i].p_vaddr + p[i].p_filesz)
            return v - p[i].p_vaddr + p[i].p_offset;
    return 0;
}

static int uprobe(void *at) {  // a counting perf event: the trap alone, without a BPF program
    FILE *f = fopen("/sys/bus/event_source/devices/uprobe/type", "r");
    int type = 0;
    if (!f || fscanf(f, "%d", &type) != 1) return -1;
    fclose(f);
    static std::string path;
    perf_event_attr a;
    memset(&a, 0, sizeof a);
    a.size = sizeof a, a.type = type, a.config2 = file_offset(at, &path), a.config1 = (uint64_t)path.c_str();
    return syscall(SYS_perf_event_open, &a, 0, -1, -1, 0);
}

int main(int argc, char **argv) {
    int rounds = argc > 3 ? atoi(argv[3]) : 5;
    void *h = dlopen(argv[1], RTLD_NOW);
    if (!h) return fprintf(stderr, "%s\n", dlerror()), 1;
    auto hook = (void (*)(int))dlsym(h, "ground_hook");
    auto init = (void (*)(const char *))dlsym(h, "ground_init");
    auto window = (void (*)(const char *, int))dlsym(h, "ground_window");
    auto count = (unsigned (*)(int))dlsym(h, "ground_count");
    int per = 50;
    std::map<std::string, std::vector<double>> ns;
    std::map<std::string, double> seen;
    block(20);
    for (int r = 0; r < rounds; r++) {
        ns["nothing"].push_back(block(per));
        hook(1);
        ns["import table, record with clock"].push_back(block(per));
        hook(2);
        ns["import table, record without clock"].push_back(block(per));
        hook(0);
        for (const char *name : {"cudaLaunchKernel", "__cudaLaunchKernel"}) {
            void *at = dlsym(RTLD_DEFAULT, name);
            int fd = at ? uprobe(at) : -1;
            if (fd < 0) continue;
            double t = block(per);
            uint64_t hits = 0;
            if (read(fd, &hits, 8) == 8 && hits) {
                char label[80];
                snprintf(label, sizeof label, "uprobe on %s, counting", name);
                ns[label].push_back(t);
                seen[label] = hits;
            }
            close(fd);
        }
        void *cu = dlopen("libcuda.so.1", RTLD_NOW);
        void *at = cu ? dlsym(cu, "cuLaunchKernel") : nullptr;
        int fd = at ? uprobe(at) : -1;
        if (fd >= 0) {
            double t = block(per);
            uint64_t hits = 0;
            if (read(fd, &hits, 8) == 8) ns["uprobe on cuLaunchKernel, counting"].push_back(t), seen["uprobe on cuLaunchKernel, counting"] = hits;
            close(fd);
        }
    }
    init(argv[2]);
    struct { const char *kinds, *name; } modes[] = {
        {"c", "CUPTI driver callback, record with clock"}, {"k", "CUPTI kernel activity"},
        {"kc", "CUPTI kernels + driver callback"}, {"kr", "CUPTI kernels + runtime activity"},
        {"kd", "CUPTI kernels + driver activity"}};
    for (int r = 0; r < rounds; r++) {
        ns["nothing, CUPTI registered"].push_back(block(per));
        for (auto &m : modes) {
            window(m.kinds, 1);
            ns[m.name].push_back(block(per));
            window(m.kinds, 0);
            seen[m.name] = strchr(m.kinds, 'k') ? count(0) : count(1);
            block(2);
        }
        ns["nothing, between CUPTI windows"].push_back(block(per));
    }
    printf("{");
    bool first = true;
    for (auto &e : ns) {
        auto v = e.second;
        std::sort(v.begin(), v.end());
        printf("%s\"%s\":{\"median_ns\":%.0f,\"min_ns\":%.0f,\"max_ns\":%.0f,\"seen\":%.0f,\"launches\":%d}", first ? "" : ",",
               e.first.c_str(), v[v.size() / 2], v.front(), v.back(), seen.count(e.first) ? seen[e.first] : 0, per * 200);
        first = false;
    }
    printf("}\n");
    return 0;
}
