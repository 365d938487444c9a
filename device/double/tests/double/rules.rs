//! Each rule of the double, broken once.

use std::ptr::{null, null_mut};

use cudarc::driver::sys;
use rustix::mm::{MapFlags, ProtFlags};

use crate::child::isolated;
use crate::device::*;

const INVALID_VALUE: u32 = 1;
const INVALID_CONTEXT: u32 = 201;

/// Runs a body that ends with the process's success, and checks a message of the double.
#[track_caller]
fn answers(test: &str, message: &[&str], body: impl FnOnce()) {
    let Some(ended) = isolated(test, &[], body) else { return };
    ended.report();
    ended.said(message);
}

/// Runs a body that the double aborts. Without strictness, the body ends.
#[track_caller]
fn aborts(test: &str, message: &[&str], body: impl FnOnce()) {
    let Some(ended) = isolated(test, &[], body) else { return };
    ended.was_aborted(message);
    assert!(!ended.ran);
    let Some(ended) = isolated(test, &[("MILLRACE_DOUBLE_STRICT", "0")], || ()) else { return };
    ended.report();
    ended.said(message);
}

#[test]
fn calls_before_the_start_are_refused() {
    answers(this_test!(), &["cuMemAddressReserve", "cuInit was not called"], || {
        let mut at = 0;
        assert_eq!(cu!(cuMemAddressReserve(&raw mut at, BLOCK, 0, 0, 0)), 3);
        ok!(cuInit(0));
    });
}

#[test]
fn calls_that_need_a_context_are_refused_without_one() {
    answers(this_test!(), &["cuStreamCreateWithPriority", "no context is current"], || {
        ok!(cuInit(0));
        let mut pointer = null_mut();
        let memory = pinned_page();
        assert_eq!(cu!(cuStreamCreateWithPriority(&raw mut pointer, 1, 0)), INVALID_CONTEXT);
        let mut event = null_mut();
        assert_eq!(cu!(cuEventCreate(&raw mut event, 0)), INVALID_CONTEXT);
        let mut free = 0;
        let mut total = 0;
        assert_eq!(cu!(cuMemGetInfo_v2(&raw mut free, &raw mut total)), INVALID_CONTEXT);
        assert_eq!(cu!(cuMemHostRegister_v2(memory, 4096, 1)), INVALID_CONTEXT);
        assert_eq!(cu!(cuMemcpyHtoDAsync_v2(0, memory, 8, null_mut())), INVALID_CONTEXT);
        assert_eq!(cu!(cuCtxSynchronize()), INVALID_CONTEXT);
        let mut module = null_mut();
        assert_eq!(cu!(cuModuleLoadData(&raw mut module, c"".as_ptr().cast())), INVALID_CONTEXT);
        // Memory and addresses need none.
        let at = mapped(1);
        ok!(cuMemUnmap(at, BLOCK));
    });
}

#[test]
fn a_released_context_is_no_longer_current() {
    answers(this_test!(), &["cuCtxSynchronize", "no context is current"], || {
        enter();
        ok!(cuCtxSynchronize());
        ok!(cuDevicePrimaryCtxRelease_v2(0));
        assert_eq!(cu!(cuCtxSynchronize()), INVALID_CONTEXT);
    });
}

fn pinned_page() -> *mut std::ffi::c_void {
    map_memfd(MapFlags::SHARED, ProtFlags::READ | ProtFlags::WRITE)
}

#[test]
fn a_mapping_begins_at_the_start_of_a_handle() {
    answers(this_test!(), &["cuMemMap", "the offset is 2097152"], || {
        ok!(cuInit(0));
        let at = reserve(2);
        let handle = create(2);
        assert_eq!(cu!(cuMemMap(at, BLOCK, BLOCK, handle, 0)), INVALID_VALUE);
    });
}

#[test]
fn a_mapping_has_the_size_of_its_handle() {
    answers(this_test!(), &["cuMemMap", "the handle has 4194304"], || {
        ok!(cuInit(0));
        let at = reserve(2);
        let handle = create(2);
        assert_eq!(cu!(cuMemMap(at, BLOCK, 0, handle, 0)), INVALID_VALUE);
    });
}

#[test]
fn a_mapping_needs_reserved_addresses_without_a_mapping() {
    answers(this_test!(), &["cuMemMap", "is mapped already"], || {
        ok!(cuInit(0));
        let at = mapped(1);
        let handle = create(1);
        assert_eq!(cu!(cuMemMap(at, BLOCK, 0, handle, 0)), INVALID_VALUE);
        assert_eq!(cu!(cuMemMap(at + BLOCK as u64, BLOCK, 0, handle, 0)), INVALID_VALUE);
        assert_eq!(cu!(cuMemAddressFree(at, BLOCK)), INVALID_VALUE);
        ok!(cuMemUnmap(at, BLOCK));
        ok!(cuMemMap(at, BLOCK, 0, handle, 0));
    });
}

#[test]
fn whole_mappings_are_unmapped() {
    answers(this_test!(), &["cuMemUnmap", "is not a row of whole mappings"], || {
        ok!(cuInit(0));
        let at = reserve(4);
        let handle = create(2);
        ok!(cuMemMap(at, 2 * BLOCK, 0, handle, 0));
        assert_eq!(cu!(cuMemUnmap(at, BLOCK)), INVALID_VALUE);
        assert_eq!(cu!(cuMemUnmap(at + BLOCK as u64, BLOCK)), INVALID_VALUE);
        assert_eq!(cu!(cuMemUnmap(at, 3 * BLOCK)), INVALID_VALUE);
        assert_eq!(open(at, 1), INVALID_VALUE);
        ok!(cuMemUnmap(at, 2 * BLOCK));
    });
}

#[test]
fn private_mappings_of_files_are_not_registered() {
    answers(this_test!(), &["cuMemHostRegister_v2", "a private mapping of a file"], || {
        enter();
        let private = map_memfd(MapFlags::PRIVATE, ProtFlags::READ);
        assert_eq!(cu!(cuMemHostRegister_v2(private, 8192, 8)), INVALID_VALUE);
        assert_eq!(cu!(cuMemHostRegister_v2(private, 1 << 40, 8)), INVALID_VALUE);
        // Memory of no file may be private.
        let memory = vec![0_u8; 8192];
        ok!(cuMemHostRegister_v2(memory.as_ptr().cast_mut().cast(), 8192, 1));
        ok!(cuMemHostUnregister(memory.as_ptr().cast_mut().cast()));
    });
}

#[test]
fn read_only_memory_is_registered_as_such() {
    answers(this_test!(), &["CU_MEMHOSTREGISTER_READ_ONLY is required"], || {
        enter();
        let memory = map_memfd(MapFlags::SHARED, ProtFlags::READ);
        assert_eq!(cu!(cuMemHostRegister_v2(memory, 8192, 1)), INVALID_VALUE);
        ok!(cuMemHostRegister_v2(memory, 8192, 1 | 8));
        // The GPU may not write there.
        let at = mapped(1);
        assert_eq!(cu!(cuMemcpyDtoHAsync_v2(memory, at, 64, stream())), INVALID_VALUE);
        ok!(cuMemHostUnregister(memory));
    });
}

#[test]
fn memory_is_registered_once() {
    answers(this_test!(), &["cuMemHostRegister_v2", "is registered or allocated already"], || {
        enter();
        let memory = pinned_page();
        ok!(cuMemHostRegister_v2(memory, 8192, 1));
        assert_eq!(cu!(cuMemHostRegister_v2(memory, 4096, 1)), 712);
        ok!(cuMemHostUnregister(memory));
        assert_eq!(cu!(cuMemHostUnregister(memory)), 713);
    });
}

#[test]
fn copies_need_mapped_memory_with_access() {
    answers(this_test!(), &["cuMemcpyHtoDAsync_v2", "device 0 may not write"], || {
        enter();
        let at = reserve(1);
        let handle = create(1);
        let stream = stream();
        let memory = pinned(64);
        assert_eq!(cu!(cuMemcpyHtoDAsync_v2(at, memory.as_ptr().cast(), 64, stream)), INVALID_VALUE);
        ok!(cuMemMap(at, BLOCK, 0, handle, 0));
        assert_eq!(cu!(cuMemcpyHtoDAsync_v2(at, memory.as_ptr().cast(), 64, stream)), INVALID_VALUE);
        assert_eq!(open(at, 1), 0);
        ok!(cuMemcpyHtoDAsync_v2(at, memory.as_ptr().cast(), 64, stream));
        assert_eq!(cu!(cuMemcpyHtoDAsync_v2(at, memory.as_ptr().cast(), BLOCK + 1, stream)), INVALID_VALUE);
        assert_eq!(cu!(cuMemcpyHtoDAsync_v2(at, null(), 64, stream)), INVALID_VALUE);
    });
}

#[test]
fn copies_are_within_registered_memory_or_outside() {
    answers(this_test!(), &["is registered only in part"], || {
        enter();
        let at = mapped(1);
        let memory = pinned_page();
        ok!(cuMemHostRegister_v2(memory, 4096, 1));
        assert_eq!(cu!(cuMemcpyHtoDAsync_v2(at, memory, 8192, stream())), INVALID_VALUE);
    });
}

#[test]
fn pageable_sources_are_read_late() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let at = mapped(1);
        let stream = stream();
        let mut source = vec![1_u8; 64];
        let mut gate = Gate::close(stream);
        ok!(cuMemcpyHtoDAsync_v2(at, source.as_ptr().cast(), 64, stream));
        source.fill(2);
        gate.open();
        ok!(cuStreamSynchronize(stream));
        assert_eq!(bytes(at, 64), source);
    }) else {
        return;
    };
    assert_eq!(ended.report()["bytes"]["pageable"], 128);
}

#[test]
fn device_memory_is_limited() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let mut handle = 0;
        let properties = properties(DESCRIPTOR);
        let whole = create(32);
        assert_eq!(cu!(cuMemCreate(&raw mut handle, BLOCK, &raw const properties, 0)), 2);
        ok!(cuMemRelease(whole));
        let mut free = 0;
        let mut total = 0;
        ok!(cuMemGetInfo_v2(&raw mut free, &raw mut total));
        assert_eq!((free, total), (64 << 20, 64 << 20));
        assert_eq!(cu!(cuMemCreate(&raw mut handle, 4096, &raw const properties, 0)), INVALID_VALUE);
        // A mapping keeps the memory.
        let at = mapped(1);
        ok!(cuMemGetInfo_v2(&raw mut free, &raw mut total));
        assert_eq!(free, 62 << 20);
        ok!(cuMemUnmap(at, BLOCK));
        create(32);
    }) else {
        return;
    };
    ended.report();
}

#[test]
fn only_memory_that_was_created_for_export_is_exported() {
    answers(this_test!(), &["cuMemImportFromShareableHandle", "not a descriptor of exported memory"], || {
        ok!(cuInit(0));
        let mut handle = 0;
        let properties = properties(sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE);
        ok!(cuMemCreate(&raw mut handle, BLOCK, &raw const properties, 0));
        let mut descriptor = -1_i32;
        let at = (&raw mut descriptor).cast();
        assert_eq!(cu!(cuMemExportToShareableHandle(at, handle, DESCRIPTOR, 0)), INVALID_VALUE);
        assert_eq!(
            cu!(cuMemImportFromShareableHandle(&raw mut handle, null_mut(), DESCRIPTOR)),
            INVALID_VALUE
        );
    });
}

#[test]
fn unmapping_memory_of_queued_work_aborts() {
    let queued = ["cuMemUnmap (call 1)", "cuMemcpyHtoDAsync_v2 (call 1)", "is still queued"];
    let body = || {
        enter();
        let at = mapped(1);
        let stream = stream();
        let gate = Gate::close(stream);
        ok!(cuMemcpyHtoDAsync_v2(at, pinned(64).as_ptr().cast(), 64, stream));
        open_later(gate);
        ok!(cuMemUnmap(at, BLOCK));
    };
    aborts(this_test!(), &queued, body);
}

/// Opens a gate when the call after this one has found the queued work, so that a double that is not
/// strict waits for the work.
fn open_later(mut gate: Gate) {
    std::thread::spawn(move || {
        std::thread::park_timeout(std::time::Duration::from_millis(300));
        gate.open();
    });
}

#[test]
fn waiting_for_an_event_before_its_recording_aborts() {
    aborts(this_test!(), &["cuStreamWaitEvent (call 1)", "before its recording"], || {
        enter();
        ok!(cuStreamWaitEvent(stream(), event(), 0));
    });
}

#[test]
fn destroying_a_stream_with_queued_work_aborts() {
    aborts(this_test!(), &["cuStreamDestroy_v2", "cuStreamWaitValue32_v2 (call 1) is still queued"], || {
        enter();
        let stream = stream();
        let _gate = Gate::close(stream);
        ok!(cuStreamDestroy_v2(stream));
    });
}

#[test]
fn unregistering_memory_of_queued_work_aborts() {
    let message = ["cuMemHostUnregister", "cuMemcpyHtoDAsync_v2 (call 1)", "is still queued"];
    aborts(this_test!(), &message, || {
        enter();
        let at = mapped(1);
        let stream = stream();
        let memory = pinned_page();
        ok!(cuMemHostRegister_v2(memory, 8192, 1));
        let gate = Gate::close(stream);
        ok!(cuMemcpyHtoDAsync_v2(at, memory, 64, stream));
        open_later(gate);
        ok!(cuMemHostUnregister(memory));
    });
}

#[test]
fn unloading_a_module_of_queued_launches_aborts() {
    aborts(this_test!(), &["cuModuleUnload", "cuLaunchKernel (call 1) is still queued"], || {
        enter();
        let stream = stream();
        let module = module();
        let _gate = Gate::close(stream);
        launch(module, c"millrace_spin", 1, 1, stream, &[1]);
        ok!(cuModuleUnload(module));
    });
}

#[test]
fn destroyed_objects_are_unknown() {
    answers(this_test!(), &["cuEventRecord", "there is no event"], || {
        enter();
        let stream = stream();
        let event = event();
        ok!(cuEventDestroy_v2(event));
        assert_eq!(cu!(cuEventRecord(event, stream)), 400);
        ok!(cuStreamDestroy_v2(stream));
        assert_eq!(cu!(cuStreamSynchronize(stream)), 400);
        assert_eq!(cu!(cuEventQuery(stream.cast())), 400);
    });
}
