//! Streams, events, values, batches and graphs, with and without delays.

use std::ptr::null_mut;

use cudarc::driver::sys;

use crate::child::isolated;
use crate::device::*;

const SEEDS: [&str; 6] = ["1", "2", "3", "4", "5", "6"];

/// Copies a block on one stream and copies it further on another, some times, with or without an event in
/// between. Returns whether all bytes arrived.
fn copy_over_two_streams(with_event: bool) -> bool {
    let at = mapped(2);
    let second = at + BLOCK as u64;
    let first_stream = stream();
    let second_stream = stream();
    let source = pinned(BLOCK);
    let mut arrived = true;
    for round in 0..16 {
        source.fill(round);
        ok!(cuMemcpyHtoDAsync_v2(at, source.as_ptr().cast(), BLOCK, first_stream));
        if with_event {
            let event = event();
            ok!(cuEventRecord(event, first_stream));
            ok!(cuStreamWaitEvent(second_stream, event, 0));
            ok!(cuEventDestroy_v2(event));
        }
        ok!(cuMemcpyDtoDAsync_v2(second, at, BLOCK, second_stream));
        ok!(cuCtxSynchronize());
        arrived &= bytes(second, BLOCK) == source;
    }
    arrived
}

#[test]
fn an_event_orders_two_streams_at_every_seed() {
    for seed in SEEDS {
        let Some(ended) = isolated(this_test!(), &[("MILLRACE_DOUBLE_SEED", seed)], || {
            enter();
            assert!(copy_over_two_streams(true));
        }) else {
            return;
        };
        ended.report();
    }
}

#[test]
fn a_missing_event_shows_at_some_seed() {
    let mut shows = false;
    for seed in SEEDS {
        let Some(ended) = isolated(this_test!(), &[("MILLRACE_DOUBLE_SEED", seed)], || {
            enter();
            assert!(copy_over_two_streams(false));
        }) else {
            return;
        };
        shows |= !ended.status.success();
    }
    assert!(shows, "no delay was long enough");
}

#[test]
fn events_have_the_times_of_their_work() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let stream = stream();
        let module = module();
        let start = event();
        let end = event();
        let mut millis = 0.0;
        ok!(cuEventRecord(start, stream));
        launch(module, c"millrace_spin", 1, 1, stream, &[200_000_000]);
        ok!(cuEventRecord(end, stream));
        assert_eq!(cu!(cuEventQuery(end)), 600);
        assert_eq!(cu!(cuEventElapsedTime_v2(&raw mut millis, start, end)), 600);
        assert_eq!(cu!(cuStreamQuery(stream)), 600);
        ok!(cuEventSynchronize(end));
        ok!(cuEventQuery(end));
        ok!(cuEventElapsedTime_v2(&raw mut millis, start, end));
        assert!(millis >= 200.0, "{millis} ms");
    }) else {
        return;
    };
    ended.report();
}

#[test]
fn a_wait_is_for_the_recording_before_the_wait() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let held = stream();
        let free = stream();
        let event = event();
        ok!(cuEventRecord(event, free));
        ok!(cuStreamWaitEvent(free, event, 0));
        let mut gate = Gate::close(held);
        ok!(cuEventRecord(event, held));
        // The first recording has happened, so this stream does not wait for the second one.
        ok!(cuStreamSynchronize(free));
        assert_eq!(cu!(cuEventQuery(event)), 600);
        gate.open();
        ok!(cuEventSynchronize(event));
        ok!(cuStreamSynchronize(held));
        gate.free();
    }) else {
        return;
    };
    ended.report();
}

#[test]
fn streams_write_and_await_values() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let flag = pinned(8);
        flag.fill(0);
        let mut at = 0;
        ok!(cuMemHostGetDevicePointer_v2(&raw mut at, flag.as_mut_ptr().cast(), 0));
        let waits = stream();
        let writes = stream();
        ok!(cuStreamWaitValue32_v2(waits, at, 5, 1));
        ok!(cuStreamWriteValue32_v2(waits, at + 4, 6, 0));
        assert_eq!(cu!(cuStreamQuery(waits)), 600);
        ok!(cuStreamWriteValue32_v2(writes, at, 5, 0));
        ok!(cuStreamSynchronize(waits));
        assert_eq!(flag, [5, 0, 0, 0, 6, 0, 0, 0]);
        assert_eq!(cu!(cuStreamWriteValue32_v2(writes, at + 1, 5, 0)), 1);
    }) else {
        return;
    };
    ended.report();
}

#[test]
fn a_batch_copies_in_all_directions() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let at = mapped(1);
        let stream = stream();
        let source = pinned(64);
        let target = pinned(64);
        source.fill(3);
        let address = |memory: &[u8]| memory.as_ptr().expose_provenance() as u64;
        let mut to = [at, at + 64, address(target)];
        let mut from = [address(source), at, at + 64];
        let mut bytes = [64_usize; 3];
        let location =
            sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: location,
            dstLocHint: location,
            flags: 0,
        };
        let mut index = 0;
        let mut batch = |count| {
            cu!(cuMemcpyBatchAsync_v2(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                bytes.as_mut_ptr(),
                count,
                &raw mut attributes,
                &raw mut index,
                1,
                stream
            ))
        };
        assert_eq!(batch(0), 1);
        assert_eq!(batch(3), 0);
        ok!(cuStreamSynchronize(stream));
        assert_eq!(target, source);
    }) else {
        return;
    };
    let expected = serde_json::json!({"to_device": 64, "to_host": 64, "within": 64, "pageable": 0});
    assert_eq!(ended.report()["bytes"], expected);
}

#[test]
fn a_graph_repeats_its_work() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let at = mapped(1);
        let stream = stream();
        let module = module();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        ok!(cuMemsetD8Async(at, 0, 64, stream));
        ok!(cuStreamBeginCapture_v2(stream, mode));
        launch(module, c"millrace_xor", 1, 32, stream, &[at, 64, 0x0101_0101]);
        assert_eq!(cu!(cuStreamSynchronize(stream)), 900);
        let mut graph = null_mut();
        let mut executable = null_mut();
        ok!(cuStreamEndCapture(stream, &raw mut graph));
        ok!(cuGraphInstantiateWithFlags(&raw mut executable, graph, 0));
        ok!(cuGraphDestroy(graph));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(bytes(at, 64), [0; 64]);
        for times in 1..4 {
            ok!(cuGraphLaunch(executable, stream));
            ok!(cuStreamSynchronize(stream));
            assert_eq!(bytes(at, 64), [times % 2; 64]);
        }
        ok!(cuGraphExecDestroy(executable));
        assert_eq!(cu!(cuGraphLaunch(executable, stream)), 400);
    }) else {
        return;
    };
    assert_eq!(ended.report()["left"]["graphs"], 0);
}
