#!/bin/sh
# torch.sh PYTHON LOG TORCH INDEX: install PyTorch's build for CPUs from INDEX if TORCH is cpu, or is empty and no GPU is seen.
# Else, or where INDEX does not answer within 5 s, pip takes the build of its own index later: PyPI's for Linux brings CUDA.
python=$1 log=$2 torch=$3 index=$4
if "$python" -m pip --disable-pip-version-check show torch > /dev/null 2>&1; then exit; fi
if [ -z "$torch" ] && ! [ -e /dev/nvidia0 ] && ! nvidia-smi -L > /dev/null 2>&1; then torch=cpu; fi
case $torch in
    cpu) ;;
    '' | cuda | keep) exit ;;
    *) echo "TORCH=$torch: allowed are cpu, cuda and keep" >&2; exit 1 ;;
esac
theirs="pip takes the build of its own index instead (PyPI's brings CUDA: a .venv of 5.9 GB, not 2.4)"
asks='import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5).read(1)'
if ! timeout 5 "$python" -c "$asks" "$index/torch/" 2> /dev/null; then
    echo "PyTorch's index of CPU builds, $index, does not answer: $theirs"
    exit
fi
wanted=$(sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
sh tools/install.sh "$python" "Installing PyTorch's CPU build" "$log" --no-deps --index-url "$index" "$wanted" || echo "$theirs"
