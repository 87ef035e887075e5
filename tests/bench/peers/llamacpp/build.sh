#!/bin/bash
# build.sh WORK CONFIG [isas]: builds llama.cpp for comparisons on the CPU, on a machine without it; about 15 minutes on
# two cores.
#
# It builds llama.cpp's libraries, llama-bench and llama-quantize from the source in the Python sdist of
# llama-cpp-python, and also lbench. It makes GGUF files of random weights in the shape of a Qwen3-MoE config.
# Afterwards WORK contains lbench, readbw, build/bin/llama-bench and gguf/*-{BF16,Q8_0,Q4_0,Q4_K_M}.gguf. With isas it
# also contains lbench-{avx2,avx2-vnni,avx512,amx}: static programs for isas.py and for other machines than this one. It
# needs python3 with venv, g++ and the network for pip.
set -eu
[ $# -eq 2 ] || [ "${3:-}" = isas ] || { echo "usage: $0 WORK CONFIG [isas]" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
config=$(realpath "$2")
mkdir -p "$1"
cd "$1"

[ -d venv ] || {
    python3 -m venv venv
    venv/bin/pip install -q numpy gguf cmake ninja scikit-build-core
}
export PATH=$PWD/venv/bin:$PATH
if [ ! -d sdist ]; then
    pip download -q --no-deps --no-build-isolation --no-binary :all: -d sdist llama-cpp-python==0.3.36
    (cd sdist && tar xf ./*.tar.gz)
fi
src=$(echo sdist/llama_cpp_python-*/vendor/llama.cpp)

cmake -S "$src" -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
ninja -C build -j2 llama llama-bench llama-quantize
g++ -O3 -march=native -std=c++17 -I"$src/include" -I"$src/ggml/include" "$here/lbench.cpp" -o lbench \
    build/src/libllama.a build/ggml/src/libggml.a build/ggml/src/libggml-cpu.a build/ggml/src/libggml-base.a \
    -fopenmp -lpthread -ldl -lm
g++ -O3 -march=native -std=c++20 "$here/readbw.cpp" -o readbw -lpthread

isa() { # NAME FLAG ..: llama.cpp for one instruction set
    name=$1; shift
    flags=(-DGGML_NATIVE=OFF)
    for flag in SSE42 AVX AVX2 FMA F16C BMI2 "$@"; do flags+=("-DGGML_$flag=ON"); done
    cmake -S "$src" -B "build-$name" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF "${flags[@]}" \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TOOLS=OFF \
        -DLLAMA_BUILD_COMMON=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
    ninja -C "build-$name" -j2 llama
    g++ -O2 -std=c++17 -I"$src/include" -I"$src/ggml/include" "$here/lbench.cpp" -o "lbench-$name" \
        "build-$name/src/libllama.a" "build-$name"/ggml/src/libggml{,-cpu,-base}.a -static -fopenmp -lpthread -ldl -lm
}
if [ "${3:-}" = isas ]; then
    avx512=(AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16)
    isa avx2
    isa avx2-vnni AVX_VNNI
    isa avx512 "${avx512[@]}"
    isa amx "${avx512[@]}" AMX_TILE AMX_INT8 AMX_BF16
fi

mkdir -p gguf
python "$here/make_gguf.py" "$config" gguf
bf16=$(ls gguf/*-BF16.gguf)
build/bin/llama-quantize "$bf16" "${bf16%-BF16.gguf}-Q4_K_M.gguf" Q4_K_M 2
