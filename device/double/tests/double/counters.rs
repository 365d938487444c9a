//! Counters and leftovers of the report.

use std::ptr::null_mut;

use serde_json::json;

use crate::child::isolated;
use crate::device::*;

#[test]
fn the_report_counts_calls_bytes_and_leftovers() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let at = mapped(2);
        let stream = stream();
        let memory = pinned(64);
        memory.fill(0);
        ok!(cuMemcpyHtoDAsync_v2(at, memory.as_ptr().cast(), 64, stream));
        ok!(cuMemcpyDtoHAsync_v2(memory.as_mut_ptr().cast(), at, 32, stream));
        ok!(cuStreamSynchronize(stream));
        event();
        module();
        let mut handle = 0;
        let properties = properties(DESCRIPTOR);
        ok!(cuMemCreate(&raw mut handle, BLOCK, &raw const properties, 0));
        let mut descriptor = -1_i32;
        ok!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, DESCRIPTOR, 0));
    }) else {
        return;
    };
    let report = ended.report();
    assert_eq!(report["creates"], 3);
    assert_eq!(report["calls"]["cuMemcpyHtoDAsync_v2"], 1);
    assert_eq!(report["calls"]["cuMemMap"], 2);
    assert_eq!(report["broken_rules"], 0);
    assert_eq!(report["bytes"], json!({"to_device": 64, "to_host": 32, "within": 0, "pageable": 0}));
    let left = json!({
        "handles": 1, "mappings": 2, "reservations": 1, "allocations": 0, "descriptors": 1,
        "registrations": 0, "host_allocations": 1, "streams": 1, "events": 1, "modules": 1, "graphs": 0,
        "green_contexts": 0, "contexts": 1,
    });
    assert_eq!(report["left"], left);
    ended.said(&["left at exit: 2 mappings"]);
}

#[test]
fn a_tidy_program_leaves_nothing() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let at = mapped(2);
        let stream = stream();
        let event = event();
        let mut memory = null_mut();
        ok!(cuMemHostAlloc(&raw mut memory, 64, 1));
        ok!(cuMemcpyHtoDAsync_v2(at, memory, 64, stream));
        ok!(cuEventRecord(event, stream));
        ok!(cuEventSynchronize(event));
        ok!(cuStreamSynchronize(stream));
        ok!(cuEventDestroy_v2(event));
        ok!(cuStreamDestroy_v2(stream));
        ok!(cuMemFreeHost(memory));
        ok!(cuMemUnmap(at, 2 * BLOCK));
        ok!(cuMemAddressFree(at, 2 * BLOCK));
        ok!(cuDevicePrimaryCtxRelease_v2(0));
    }) else {
        return;
    };
    let left = ended.report()["left"].as_object().unwrap();
    assert!(left.values().all(|count| count == 0), "{left:?}");
    assert!(!ended.stderr.contains("left at exit"), "{}", ended.stderr);
}
