// What the programs of this folder share: arrays on the device, random numbers, and a verdict.
#pragma once
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

inline std::mt19937 generator(7);

inline float normal() { return std::normal_distribution<float>()(generator); }
inline int below(int n) { return std::uniform_int_distribution<int>(0, n - 1)(generator); }

inline void check(cudaError_t status, const char *what) {
    if (status != cudaSuccess) {
        printf("%s: %s\n", what, cudaGetErrorString(status));
        exit(1);
    }
}

// An array of the host and its copy on the device.
template <class T> struct Array {
    std::vector<T> host;
    T *device = nullptr;

    explicit Array(size_t n, T value = T()) : host(n, value) { check(cudaMalloc(&device, n * sizeof(T)), "cudaMalloc"); }
    T *upload() {
        check(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
        return device;
    }
    void download() {
        check(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    }
    T &operator[](size_t i) { return host[i]; }
};

// Largest error and largest value of what was compared. The values go to the folder FIELD_OUT, if that is set.
struct Agreement {
    double error = 0, size = 0;
    std::vector<float> values;
    void add(double found, double right) {
        values.push_back(float(found));
        error = std::isnan(found) ? INFINITY : fmax(error, fabs(found - right));
        size = fmax(size, fabs(right));
    }
    // bound: relative to the largest value
    int verdict(const char *what, double bound) const {
        if (const char *folder = getenv("FIELD_OUT")) {
            FILE *file = fopen((std::string(folder) + "/" + what + ".f32").c_str(), "wb");
            if (!file || fwrite(values.data(), 4, values.size(), file) != values.size() || fclose(file)) return 1;
        }
        printf("%s: error %.2g of %.3g\n", what, error, size);
        return !(error <= bound * size && size > 0);
    }
};
