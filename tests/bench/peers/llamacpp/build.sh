#!/bin/bash
# build.sh WORK CONFIG: llama.cpp as a rival on the CPU, from a clean machine; about 15 minutes on two cores.
#
# Builds llama.cpp's libraries, llama-bench and llama-quantize from the source that the Python sdist of llama-cpp-python
# ships, and lbench beside them; makes GGUF files of random weights in the shape of a Qwen3-MoE config.
# Afterwards WORK holds lbench, readbw, build/bin/llama-bench and gguf/*-{BF16,Q8_0,Q4_0,Q4_K_M}.gguf.
# Needs python3 with venv, g++ and the network for pip.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 WORK CONFIG" >&2; exit 2; }
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

mkdir -p gguf
python "$here/make_gguf.py" "$config" gguf
bf16=$(ls gguf/*-BF16.gguf)
build/bin/llama-quantize "$bf16" "${bf16%-BF16.gguf}-Q4_K_M.gguf" Q4_K_M 2
