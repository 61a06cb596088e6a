#!/bin/sh
# Compiles every kernel of csrc_ascend/npu against the headers of a CANN toolkit with g++, as CANN's CPU debugging does.
#
#   scripts/check_ascendc.sh CANN_HOME        such as /usr/local/Ascend/ascend-toolkit/latest
#
# It shows that each call has a declaration with these types; nothing is linked or run. The definitions and the directories
# are those of the toolkit's own tools/tikicpulib/lib/cmake for Ascend910B1.
set -eu

if [ $# -ne 1 ]; then
  echo "usage: $0 CANN_HOME" >&2
  exit 2
fi
cann=$1
source=$(cd "$(dirname "$0")/.." && pwd)/csrc_ascend
compiler=${CXX:-g++}

debug=$cann/tools/tikicpulib/lib/include
if [ ! -f "$debug/kern_fwk.h" ]; then
  echo "$0: there is no tools/tikicpulib/lib/include/kern_fwk.h in $cann: give the directory of a CANN toolkit" >&2
  exit 2
fi

# the headers lie elsewhere in each release
includes="-isystem $debug"
found=no
for directory in compiler/tikcpp/tikcfw compiler/ascendc/include/basic_api "$(uname -m)-linux/ascendc/include/basic_api" \
  aarch64-linux/ascendc/include/basic_api x86_64-linux/ascendc/include/basic_api "$(uname -m)-linux/tikcpp/tikcfw"; do
  [ "$found" = no ] && [ -f "$cann/$directory/kernel_operator.h" ] || continue
  found=yes
  for part in . interface impl inner_interface ../highlevel_api ../highlevel_api/lib ../highlevel_api/impl; do
    [ -d "$cann/$directory/$part" ] && includes="$includes -isystem $cann/$directory/$part"
  done
done
if [ "$found" = no ]; then
  echo "$0: there is no kernel_operator.h of Ascend C in $cann" >&2
  exit 2
fi

failed=0
for kernel in "$source"/npu/*/op_kernel.cpp; do
  name=$(basename "$(dirname "$kernel")")
  # only CANN's compiler knows the launch syntax
  if "$compiler" -std=c++17 -fsyntax-only -w -D__CCE_AICORE__=220 -D__DAV_C220__ -D__CCE_KT_TEST__=1 \
    -D_GLIBCXX_USE_CXX11_ABI=0 -DASCENDC_CPU_DEBUG=1 -DASCENDC_DEBUG=1 \
    '-DASCEND_NPU_LAUNCH(kernel, cores, stream, ...)=static_cast<void>(0)' "-I$source" $includes "$kernel"; then
    echo "ok      $name"
  else
    echo "FAILED  $name"
    failed=$((failed + 1))
  fi
done
[ $failed -eq 0 ]
