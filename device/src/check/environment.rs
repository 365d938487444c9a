//! Checks 1 and 2: the machine and the context.

use std::fs;

use crate::cuda::driver::context::WaitMode;
use crate::cuda::driver::{self, Attribute, Context, Gpu, Kernels, MemoryHandle, memory};

use super::bench::{BLOCK, first_gpu, host_time};
use super::finding::{CheckError, Findings, micros, millis};

const MIB: f64 = (1 << 20) as f64;

/// Check 1: what the driver, the GPU and the kernel offer.
pub(super) fn attributes(found: &mut Findings) -> Result<(), CheckError> {
    let gpus = Gpu::all()?;
    found.value("GPUs", gpus.len() as f64, "");
    let gpu = first_gpu()?;
    found.note(format!("GPU: {}, {}", gpu.name()?, gpu.uuid()?));
    found.note(format!("driver's CUDA version: {}", driver::cuda_version()?));
    if let Ok(version) = fs::read_to_string("/proc/driver/nvidia/version") {
        found.note(format!("kernel module: {}", version.lines().next().unwrap_or_default()));
    }
    found.note(format!("kernel: {}", rustix::system::uname().release().to_string_lossy()));
    found.value("memory", gpu.memory()?.get() as f64 / MIB, "MiB");
    let wanted = [
        ("virtual memory management", Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),
        ("export as descriptors", Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
        ("read-only registration", Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED),
        ("unified addresses", Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING),
    ];
    for (name, attribute) in wanted {
        found.expect(name, f64::from(gpu.attribute(attribute)?), "", 1.0..=1.0);
    }
    let facts = [
        ("compute capability, major", Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        ("compute capability, minor", Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        ("SMs", Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        ("copy engines", Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT),
        ("access to pageable memory", Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS),
        ("L2 cache, bytes", Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
    ];
    for (name, attribute) in facts {
        found.value(name, f64::from(gpu.attribute(attribute)?), "");
    }
    found.expect("granularity of memory", memory::granularity(gpu)? as f64 / MIB, "MiB", 2.0..=2.0);
    found.note(format!("green contexts: {}", driver::has_green_contexts()));
    found.note(format!("graphs: {}", driver::has_graphs()));
    let memlock = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    found.note(format!("locked memory: {}", memlock.map_or("unlimited".to_owned(), |n| n.to_string())));
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    found.note(format!("open files: {}", files.map_or("unlimited".to_owned(), |n| n.to_string())));
    for (what, path) in [
        ("transparent huge pages", "/sys/kernel/mm/transparent_hugepage/enabled"),
        ("transparent huge pages of shared memory", "/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        ("reserved huge pages", "/proc/sys/vm/nr_hugepages"),
    ] {
        if let Ok(text) = fs::read_to_string(path) {
            found.note(format!("{what}: {}", text.trim()));
        }
    }
    let mps = std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path).any(|folder| folder.join("nvidia-cuda-mps-control").exists())
    });
    found.note(format!("MPS control program: {}", if mps { "found" } else { "not found" }));
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    found.value("cores", cores as f64, "");
    Ok(())
}

/// Check 2: the cost of a context, and of the kernels.
pub(super) fn context(found: &mut Findings) -> Result<(), CheckError> {
    let gpu = first_gpu()?;
    // Creating memory needs no context, if this call succeeds before one is open.
    match MemoryHandle::create(gpu, BLOCK) {
        Ok(_) => found.note("memory can be created without a context"),
        Err(error) => found.note(format!("memory cannot be created without a context: {error}")),
    }
    let used_before = nvidia_smi_used();
    let (context, time) = host_time(|| Context::open(gpu, WaitMode::Spin))?;
    found.expect("opening a context", millis(time), "ms", 100.0..=400.0);
    let (free, total) = context.memory()?;
    found.expect(
        "memory in use with one context",
        (total.get() - free.get()) as f64 / MIB,
        "MiB",
        300.0..=1200.0,
    );
    if let Some((before, after)) = used_before.zip(nvidia_smi_used()) {
        found.expect("memory of a context", after - before, "MiB", 250.0..=650.0);
    }
    let (kernels, time) = host_time(|| Kernels::load(&context))?;
    found.value("compiling the kernels", millis(time), "ms");
    drop(kernels);
    let (again, time) = host_time(|| Kernels::load(&context))?;
    found.value("loading the kernels again", millis(time), "ms");
    drop(again);
    let ((), time) = host_time(|| context.enter())?;
    found.value("making the context current", micros(time), "µs");
    Ok(())
}

/// Returns the memory in use by nvidia-smi, in MiB, if that program is here.
fn nvidia_smi_used() -> Option<f64> {
    let output = std::process::Command::new("nvidia-smi")
        .args(["--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"])
        .output()
        .ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}
