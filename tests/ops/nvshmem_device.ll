; Stands for NVSHMEM's device library where kernels are compiled and not run: it stores its arguments.
target datalayout = "e-i64:64-i128:128-v16:16-v32:32-n16:32:64"
target triple = "nvptx64-nvidia-cuda"

define i32 @nvshmemx_putmem_signal_block(i64 %destination, i64 %source, i64 %size, i64 %word, i64 %value, i32 %operation, i32 %pe) {
  %to = inttoptr i64 %destination to ptr
  %sum = add i64 %source, %size
  store volatile i64 %sum, ptr %to
  %flag = inttoptr i64 %word to ptr
  store volatile i64 %value, ptr %flag
  %which = add i32 %operation, %pe
  ret i32 %which
}

define i32 @nvshmem_signal_wait_until(i64 %word, i32 %comparison, i64 %value) {
  %flag = inttoptr i64 %word to ptr
  %seen = load volatile i64, ptr %flag
  ret i32 %comparison
}
