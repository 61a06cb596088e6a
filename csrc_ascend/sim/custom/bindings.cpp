// The custom operators' bindings and host code, as CMake compiles them, in one translation unit: torch_npu's
// headers take longer than all of it.
#include "npu/bind/device.cpp"
#include "npu/bind/kv.cpp"
#include "npu/bind/schemas.cpp"
#include "npu/bind/steps.cpp"
#include "npu/edit_and_sample/op_host.cpp"
#include "npu/lora_expand/op_host.cpp"
#include "npu/lora_shrink/op_host.cpp"
#include "npu/norm_rope_store/op_host.cpp"
#include "npu/store_kv/op_host.cpp"
