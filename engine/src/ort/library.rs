//! Opens the library of ONNX Runtime, which this program does not link.
#![allow(unsafe_code, reason = "the `ort` crate has no safe call that registers an allocator")]

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ort::AsPointer as _;
use ort::environment::{Environment, GlobalThreadPoolOptions};
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};

use crate::error::Error;

/// Variable that holds the path of the library, as in other programs over ONNX Runtime.
pub const LIBRARY_VARIABLE: &str = "ORT_DYLIB_PATH";

/// File of the CUDA provider, beside the library.
const CUDA_PROVIDER: &str = "libonnxruntime_providers_cuda.so";

/// The environment of this process. ONNX Runtime allows a single one, so it is never dropped.
static ENVIRONMENT: Mutex<Option<Environment>> = Mutex::new(None);

/// Returns the path of the library from the environment of this process.
///
/// # Errors
/// [`Error::Library`] if the variable is not set, or does not name a file.
pub fn library_path() -> Result<PathBuf, Error> {
    let path = std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty());
    let path = path.ok_or_else(|| {
        Error::Library(format!("{LIBRARY_VARIABLE} is not set: set it to the path of libonnxruntime.so"))
    })?;
    // `ort` would look for a relative path beside this executable first.
    let absolute = std::path::absolute(&path)
        .map_err(|error| Error::Library(format!("{}: {error}", Path::new(&path).display())))?;
    match absolute.is_file() {
        true => Ok(absolute),
        false => Err(Error::Library(format!("there is no file {}", absolute.display()))),
    }
}

/// Checks that the library can be opened and is new enough, and closes the library again. Returns its path.
///
/// # Errors
/// [`Error::Library`].
pub fn check_library() -> Result<PathBuf, Error> {
    let path = library_path()?;
    match ort::util::probe(&path) {
        Some(version) if version >= ort::MINOR_VERSION => Ok(path),
        Some(version) => Err(Error::Library(too_old(&path, version))),
        None => Err(Error::Library(format!("{} is no library of ONNX Runtime", path.display()))),
    }
}

/// Checks that the library can compute on CUDA GPUs too: the library of the provider is beside it.
///
/// # Errors
/// [`Error::Library`].
pub fn check_cuda_library() -> Result<(), Error> {
    let provider = check_library()?.with_file_name(CUDA_PROVIDER);
    match provider.is_file() {
        true => Ok(()),
        false => Err(Error::Library(format!(
            "there is no file {}: this build of ONNX Runtime is for the CPU alone",
            provider.display()
        ))),
    }
}

fn too_old(path: &Path, version: u32) -> String {
    let needed = ort::MINOR_VERSION;
    format!("{} is version 1.{version}, and 1.{needed} or newer is needed", path.display())
}

/// Opens the library and creates the environment of this process. Later calls return the same environment,
/// with the threads of the first call. Public for benches, which compare an engine with sessions of their own.
///
/// # Errors
/// [`Error::Library`].
pub fn environment(threads: NonZeroUsize) -> Result<Environment, Error> {
    let mut current = ENVIRONMENT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(environment) = &*current {
        return Ok(environment.clone());
    }
    let path = library_path()?;
    let builder = ort::init_from(&path).map_err(|error| Error::Library(error.to_string()))?;
    let environment = builder
        .with_name("millrace")
        .with_telemetry(false)
        .with_global_thread_pool(thread_pool(threads)?)
        .build()?;
    share_cpu_memory(&environment)?;
    *current = Some(environment.clone());
    Ok(environment)
}

/// A pool for all sessions, because a pool for each session would mean threads for each launch of each model.
/// Threads do not spin: the threads of all executors of a machine share its cores.
fn thread_pool(threads: NonZeroUsize) -> Result<GlobalThreadPoolOptions, ort::Error> {
    GlobalThreadPoolOptions::default()
        .with_intra_threads(threads.get())?
        .with_inter_threads(1)?
        .with_spin_control(false)
}

/// Lets all sessions take host memory from a single arena. An arena for each session would keep the memory of
/// its largest launch.
fn share_cpu_memory(environment: &Environment) -> Result<(), ort::Error> {
    let memory = MemoryInfo::new(AllocationDevice::CPU, 0, AllocatorType::Arena, MemoryType::Default)?;
    let environment = environment.ptr().cast_mut();
    // SAFETY: both pointers are of live objects. ONNX Runtime copies the memory info, and takes its own
    // defaults for an arena without options. The call is made once, before any session exists.
    let status =
        unsafe { (ort::api().CreateAndRegisterAllocator)(environment, memory.ptr(), std::ptr::null()) };
    // SAFETY: the status comes from the call above and is used once.
    unsafe { ort::Error::result_from_status(status) }
}
