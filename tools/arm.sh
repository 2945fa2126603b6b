#!/bin/sh
# arm.sh PYTEST_ARGUMENTS: run tests of the CPU kernels on an ARM with FEAT_BF16 that QEMU emulates: arithmetic as it would be,
# not its speed (kernels are compiled and run about 30 times slower). On Debian 12 as root, after `make install-test`; the first
# run fetches 200 MB and makes .tools/arm. PyTorch is the newest whose wheel for aarch64 needs no CUDA.
set -eu
arm=$PWD/.tools/arm venv=$PWD/.venv
of_venv() { "$venv/bin/pip" freeze | grep -E "^($1)=="; }
if [ ! -e "$arm/made" ]; then
	mkdir -p "$arm/debs" "$arm/root/proc" "$arm/site" && cd "$arm/debs"
	dpkg --add-architecture arm64 && apt-get -qq update
	DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends qemu-user > /dev/null
	for name in libc6 python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libexpat1 zlib1g libssl3 libffi8 \
		libbz2-1.0 liblzma5 libsqlite3-0 libgcc-s1 libstdc++6; do apt-get -qq download "$name:arm64"; done
	for deb in *.deb; do dpkg -x "$deb" ../root; done
	"$venv/bin/pip" download -q -d ../wheels --no-deps --only-binary :all: --python-version 311 --platform manylinux_2_28_aarch64 \
		--platform manylinux2014_aarch64 torch==2.9.1 $(of_venv "numba|llvmlite|numpy|msgspec|psutil|xxhash|MarkupSafe")
	for wheel in ../wheels/*.whl; do python3 -m zipfile -e "$wheel" ../site; done
	# what Linux says of a Neoverse N2; LLVM reads it
	printf 'processor\t: 0\nFeatures\t: fp asimd aes pmull sha1 sha2 crc32 atomics sha3 sve sve2 bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd49\n' \
		> ../root/proc/cpuinfo
	printf '#!/bin/sh\nexport PYTHONHOME=%s\nexec qemu-aarch64 -L %s -cpu max -0 "$0" %s/usr/bin/python3.11 "$@"\n' \
		"$arm/root/usr" "$arm/root" "$arm/root" > ../python
	chmod +x ../python && touch ../made && cd ../../..
fi
export NUMBA_CACHE_DIR="$arm/kernels" OMP_NUM_THREADS=1
export PYTHONPATH="$arm/site:$PWD:$(echo "$venv"/lib/python3.*/site-packages)"  # of the last, what is Python alone
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTEST_PLUGINS=pytest_timeout,pytest_asyncio.plugin
exec "$arm/python" -m pytest --timeout 3600 "$@"
