#!/usr/bin/env bash
# Installs all that training needs: requirements/install.sh PYTHON DEVICE [STACK]
#
# PYTHON is that of the environment, DEVICE cpu or cuda, STACK a file of stacks/ without its suffix. If none is given, the newest
# is taken; on CPU machines the newest whose CPU build of torch is in pip's own index or in CPU_INDEX. PyPI has CUDA builds only.
set -euo pipefail
python=$1 device=$2 stack=${3:-}
cd "$(dirname "${BASH_SOURCE[0]}")"
CPU_INDEX=${CPU_INDEX:-https://download.pytorch.org/whl/cpu}
mapfile -t stacks < <([ -n "$stack" ] && echo "$stack" || basename --suffix=.txt stacks/* | sort --version-sort --reverse)

# Bytecode is written at first import, which is faster than compiling what is never imported.
pip_install() { "$python" -m pip --disable-pip-version-check install --quiet --no-compile "$@"; }

install_from() {  # STACK and arguments of pip
    pip_install --constraint "stacks/$1.txt" --requirement "$device.txt" "${@:2}"
}

install_cpu_build() {
    local build
    build=$(sed -n 's/^torch==.*/&+cpu/p' "stacks/$1.txt")
    install_from "$1" "$build" 2>/dev/null || install_from "$1" --extra-index-url "$CPU_INDEX" "$build" 2>/dev/null
}

taken=
if [ "$device" = cpu ]; then
    for each in "${stacks[@]}"; do
        if install_cpu_build "$each"; then
            taken=$each
            break
        fi
        echo "torch $each: no CPU build of it in pip's index or $CPU_INDEX"
    done
fi
if [ -z "$taken" ]; then
    taken=${stacks[0]}
    [ "$device" = cuda ] || echo "torch $taken: taking its CUDA build, which is larger and runs on CPUs too"
    install_from "$taken"
fi
pip_install --constraint "stacks/$taken.txt" --no-deps torchrec
echo "installed torch $taken and what belongs to it"
