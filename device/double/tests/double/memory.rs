//! Memory: aliases, fresh bytes, sharing between processes.
#![allow(unsafe_code, reason = "calls the driver, and reads memory without access")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};
use std::ptr::null_mut;

use crate::child::isolated;
use crate::device::*;

#[test]
fn a_handle_mapped_twice_shows_the_same_bytes() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let at = reserve(2);
        let handle = create(1);
        let second = at + BLOCK as u64;
        ok!(cuMemMap(at, BLOCK, 0, handle, 0));
        ok!(cuMemMap(second, BLOCK, 0, handle, 0));
        ok!(cuMemRelease(handle));
        assert_eq!(open(at, 2), 0);
        // New memory has a value that no program expects.
        assert_eq!(bytes(at, BLOCK), [0xa5; BLOCK]);
        let stream = stream();
        ok!(cuMemsetD8Async(at, 7, 64, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(bytes(second, 64), [7; 64]);
        ok!(cuMemUnmap(at, BLOCK));
        assert_eq!(bytes(second, 64), [7; 64]);
    }) else {
        return;
    };
    ended.report();
}

#[test]
fn the_process_cannot_read_memory_without_access() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let at = mapped(1);
        ok!(cuMemUnmap(at, BLOCK));
        // SAFETY: the read faults, which is the point of the test.
        unsafe { std::ptr::with_exposed_provenance::<u8>(at as usize).read_volatile() };
    }) else {
        return;
    };
    assert_eq!(ended.status.signal(), Some(11), "{ended:#?}");
}

#[test]
fn free_addresses_are_reserved_at_the_hint() {
    let Some(ended) = isolated(this_test!(), &[], || {
        ok!(cuInit(0));
        let hint = 0x3000_0000_0000;
        let mut at = 0;
        ok!(cuMemAddressReserve(&raw mut at, BLOCK, 0, hint, 0));
        assert_eq!(at, hint);
        let mut other = 0;
        ok!(cuMemAddressReserve(&raw mut other, BLOCK, 0, hint, 0));
        assert_ne!(other, hint);
        ok!(cuMemAddressFree(at, BLOCK));
        ok!(cuMemAddressFree(other, BLOCK));
    }) else {
        return;
    };
    assert_eq!(ended.report()["left"]["reservations"], 0);
}

#[test]
fn simple_allocations_are_memory_with_access() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let mut at = 0;
        ok!(cuMemAlloc_v2(&raw mut at, 100));
        ok!(cuMemcpyHtoD_v2(at, [3_u8; 100].as_ptr().cast(), 100));
        assert_eq!(bytes(at, 100), [3; 100]);
        assert_eq!(cu!(cuMemUnmap(at, BLOCK)), 1);
        ok!(cuMemFree_v2(at));
        assert_eq!(cu!(cuMemFree_v2(at)), 1);
    }) else {
        return;
    };
    assert_eq!(ended.report()["left"]["allocations"], 0);
}

/// Variable by which the second process of a test knows its part.
const EXPORTER: &str = "MILLRACE_DOUBLE_EXPORTER";

#[test]
fn imported_memory_outlives_a_killed_exporter() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        if std::env::var_os(EXPORTER).is_some() {
            return export_and_wait();
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([this_test_name(), "--exact", "--nocapture", "--test-threads=1"]);
        let mut exporter = command.env(EXPORTER, "1").stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(exporter.stdout.take().unwrap()).lines();
        let descriptor =
            lines.map(Result::unwrap).find_map(|line| Some(line.split_once("exported ")?.1.to_owned()));
        let path = format!("/proc/{}/fd/{}", exporter.id(), descriptor.unwrap());
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let mut handle = 0;
        let number = std::ptr::without_provenance_mut(file.as_raw_fd() as usize);
        ok!(cuMemImportFromShareableHandle(&raw mut handle, number, DESCRIPTOR));
        drop(file);
        exporter.kill().unwrap();
        exporter.wait().unwrap();
        let at = reserve(1);
        ok!(cuMemMap(at, BLOCK, 0, handle, 0));
        assert_eq!(open(at, 1), 0);
        assert_eq!(bytes(at, 64), [9; 64]);
        let stream = stream();
        ok!(cuMemsetD8Async(at, 8, 64, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(bytes(at, 64), [8; 64]);
    }) else {
        return;
    };
    let report = ended.report();
    assert_eq!((&report["left"]["descriptors"], &report["creates"]), (&0.into(), &0.into()));
}

fn this_test_name() -> &'static str {
    "memory::imported_memory_outlives_a_killed_exporter"
}

/// Writes to memory, exports the memory, and waits to be killed.
fn export_and_wait() {
    let at = reserve(1);
    let handle = create(1);
    let stream = stream();
    ok!(cuMemMap(at, BLOCK, 0, handle, 0));
    assert_eq!(open(at, 1), 0);
    ok!(cuMemsetD8Async(at, 9, 64, stream));
    ok!(cuStreamSynchronize(stream));
    let mut descriptor = -1_i32;
    ok!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, DESCRIPTOR, 0));
    println!("exported {descriptor}");
    std::io::stdout().flush().unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn visible_devices_are_chosen_by_uuid() {
    let second = "GPU-6d696c6c-7261-6365-0000-000000000001";
    let variables = [("MILLRACE_DOUBLE_DEVICES", "2"), ("CUDA_VISIBLE_DEVICES", second)];
    let Some(ended) = isolated(this_test!(), &variables, || {
        ok!(cuInit(0));
        let (mut count, mut uuid) = (0, cudarc::driver::sys::CUuuid { bytes: [0; 16] });
        ok!(cuDeviceGetCount(&raw mut count));
        ok!(cuDeviceGetUuid_v2(&raw mut uuid, 0));
        assert_eq!((count, uuid.bytes[15]), (1, 1));
        let mut context = null_mut();
        assert_eq!(cu!(cuDevicePrimaryCtxRetain(&raw mut context, 1)), 101);
    }) else {
        return;
    };
    ended.report();
}
