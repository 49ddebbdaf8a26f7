// SPDX-License-Identifier: Apache-2.0
// What each state of CUPTI costs a launch, and whether it can be left again: one process, one CUPTI.
//
//   stages WINDOWS_SO CUPTI_PATH MODE CYCLES
//     cost  each stage timed: ns a launch, us a graph replay, us a decode step (replay + 5 launches + sync)
//     idle | exit | busy   CYCLES of register, window, finalize while a thread replays graphs and launches
//           kernels: finalized by that thread with the device idle, by a callback at the exit of its
//           synchronizing calls, or by another thread in the middle of it all
// Every kernel adds one to a counter: the last line shows whether all were run. One line of JSON.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        cudaError_t e_ = (x);                                                                      \
        if (e_ != cudaSuccess) {                                                                   \
            printf("{\"error\":\"%s\",\"at\":\"%s\",\"stage\":\"%s\",\"cycles\":%d}\n",              \
                   cudaGetErrorString(e_), #x, stage, (int)cycles_done);                           \
            fflush(stdout);                                                                        \
            _exit(4);                                                                              \
        }                                                                                          \
    } while (0)

static const char *stage = "start";
static std::atomic<int> cycles_done;
static unsigned long long *counter;
static unsigned long long expected;
static cudaStream_t stream;
static cudaGraphExec_t graph;

__global__ void add(unsigned long long *c) { atomicAdd(c, 1ull); }

static double now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static void launch(int n) {
    for (int i = 0; i < n; i++) add<<<1, 1, 0, stream>>>(counter);
    expected += n;
}
static void replay() {
    CHECK(cudaGraphLaunch(graph, stream));
    expected += 50;
}

static double time_launch() {
    std::vector<double> v;
    for (int b = 0; b < 40; b++) {
        double t = now_ns();
        launch(200);
        v.push_back((now_ns() - t) / 200);
        CHECK(cudaStreamSynchronize(stream));
    }
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}
static double time_replay() {
    std::vector<double> v;
    for (int b = 0; b < 30; b++) {
        double t = now_ns();
        for (int i = 0; i < 20; i++) replay();
        CHECK(cudaStreamSynchronize(stream));
        v.push_back((now_ns() - t) / 20e3);
    }
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}
static double time_decode() {
    std::vector<double> v;
    for (int b = 0; b < 400; b++) {
        double t = now_ns();
        replay();
        launch(5);
        CHECK(cudaStreamSynchronize(stream));
        v.push_back((now_ns() - t) / 1e3);
    }
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

static void time_stage(const char *name) {
    stage = name;
    time_launch();
    double l[3], r[3], d[3];
    for (int i = 0; i < 3; i++) l[i] = time_launch(), r[i] = time_replay(), d[i] = time_decode();
    std::sort(l, l + 3), std::sort(r, r + 3), std::sort(d, d + 3);
    printf("\"%s\":[%.0f,%.2f,%.2f],", name, l[1], r[1], d[1]);
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    void *h = dlopen(argv[1], RTLD_NOW);
    if (!h) return fprintf(stderr, "%s\n", dlerror()), 1;
    auto load = (void (*)(const char *))dlsym(h, "ground_load");
    auto init = (void (*)(const char *))dlsym(h, "ground_init");
    auto window = (void (*)(const char *, int))dlsym(h, "ground_window");
    auto finalize = (int (*)())dlsym(h, "ground_finalize");
    auto at_sync = (void (*)())dlsym(h, "ground_finalize_at_sync");
    auto count = (unsigned (*)(int))dlsym(h, "ground_count");
    std::string mode = argv[3];
    int cycles = atoi(argv[4]);
    CHECK(cudaMalloc(&counter, 8));
    CHECK(cudaMemset(counter, 0, 8));
    CHECK(cudaStreamCreate(&stream));
    cudaGraph_t g;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 50; i++) add<<<1, 1, 0, stream>>>(counter);
    CHECK(cudaStreamEndCapture(stream, &g));
    CHECK(cudaGraphInstantiate(&graph, g, 0));
    launch(1000), replay();
    CHECK(cudaStreamSynchronize(stream));
    printf("{");
    if (mode == "cost") {
        time_stage("nothing");
        time_stage("nothing again");
        load(argv[2]);
        time_stage("loaded");
        init(argv[2]);
        time_stage("registered");
        window("k", 1);
        time_stage("kernel window");
        window("k", 0);
        time_stage("after it");
        window("kc", 1);
        time_stage("kernel + callback window");
        window("kc", 0);
        time_stage("after both");
        printf("\"records\":%u,\"finalize\":%d,", count(0), finalize());
        time_stage("finalized");
        init(argv[2]);
        window("k", 1);
        time_stage("second kernel window");
        window("k", 0);
        printf("\"records2\":%u,\"finalize2\":%d,", count(0), finalize());
        time_stage("finalized again");
    } else {
        init(argv[2]);
        finalize();
        std::atomic<bool> over{false};
        unsigned long long records = 0, low = 0;
        auto work = [&](int steps) {
            for (int i = 0; i < steps; i++) {
                replay();
                launch(5);
                if (i % 8 == 7) CHECK(cudaStreamSynchronize(stream));
            }
            CHECK(cudaStreamSynchronize(stream));
        };
        stage = mode.c_str();
        if (mode == "idle") {
            for (int i = 0; i < cycles; i++) {
                work(50);
                init(argv[2]);
                window("k", 1);
                work(100);
                window("k", 0);
                records += count(0), low += 100 * 55;
                finalize();
                cycles_done++;
            }
        } else {
            std::thread other([&] {
                for (int i = 0; i < cycles; i++) {
                    usleep(5000);
                    init(argv[2]);
                    window("k", 1);
                    usleep(10000);
                    window("k", 0);
                    records += count(0);
                    if (mode == "busy") finalize();
                    else at_sync();
                    cycles_done++;
                }
                over = true;
            });
            while (!over) work(8);
            other.join();
        }
        work(200);
        printf("\"cycles\":%d,\"records\":%llu,\"at_least\":%llu,", (int)cycles_done, records, low);
    }
    unsigned long long got = 0;
    CHECK(cudaMemcpy(&got, counter, 8, cudaMemcpyDeviceToHost));
    printf("\"kernels\":%llu,\"right\":%s}\n", expected, got == expected ? "true" : "false");
    return 0;
}
