//! Injected faults.
#![allow(unsafe_code, reason = "calls the driver")]

use std::ffi::CStr;
use std::ptr::null;

use cudarc::driver::sys;

use crate::child::isolated;
use crate::device::*;

#[test]
fn the_nth_call_answers_the_code() {
    let variables = [("MILLRACE_DOUBLE_FAULT", "cuMemcpyHtoDAsync_v2:3:2")];
    let Some(ended) = isolated(this_test!(), &variables, || {
        enter();
        let at = mapped(1);
        let stream = stream();
        let memory = pinned(64);
        let copy = || cu!(cuMemcpyHtoDAsync_v2(at, memory.as_ptr().cast(), 64, stream));
        assert_eq!([copy(), copy(), copy(), copy()], [0, 0, 2, 0]);
    }) else {
        return;
    };
    ended.report();
    ended.said(&["cuMemcpyHtoDAsync_v2 (call 3)", "injected CUDA_ERROR_OUT_OF_MEMORY"]);
}

#[test]
fn an_illegal_address_stays() {
    let variables = [("MILLRACE_DOUBLE_FAULT", "cuEventRecord:1:700")];
    let Some(ended) = isolated(this_test!(), &variables, || {
        enter();
        let stream = stream();
        let event = event();
        assert_eq!(cu!(cuEventRecord(event, stream)), 700);
        assert_eq!(cu!(cuStreamSynchronize(stream)), 700);
        assert_eq!(cu!(cuEventQuery(event)), 700);
        let mut name = null();
        ok!(cuGetErrorName(sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, &raw mut name));
        // SAFETY: the double's names stay until the process ends.
        assert_eq!(unsafe { CStr::from_ptr(name) }, c"CUDA_ERROR_ILLEGAL_ADDRESS");
    }) else {
        return;
    };
    ended.report();
}

#[test]
fn a_late_fault_shows_at_the_event() {
    let variables = [("MILLRACE_DOUBLE_FAULT", "cuMemcpyHtoDAsync_v2:1:700:late")];
    let Some(ended) = isolated(this_test!(), &variables, || {
        enter();
        let at = mapped(1);
        let stream = stream();
        let memory = pinned(64);
        let event = event();
        let mut gate = Gate::close(stream);
        ok!(cuMemcpyHtoDAsync_v2(at, memory.as_ptr().cast(), 64, stream));
        ok!(cuEventRecord(event, stream));
        gate.open();
        assert_eq!(cu!(cuEventSynchronize(event)), 700);
    }) else {
        return;
    };
    ended.report();
}

#[test]
fn a_fault_occurs_once_and_a_lost_device_stays_lost() {
    let folder = tempfile::tempdir().unwrap();
    let once = folder.path().join("once");
    let test = this_test!();
    for (code, next) in [("700", 0), ("999", 999)] {
        let fault = format!("cuMemGetInfo_v2:1:{code}");
        let variables =
            [("MILLRACE_DOUBLE_FAULT", &*fault), ("MILLRACE_DOUBLE_FAULT_ONCE", once.to_str().unwrap())];
        let run = |expected: &str| {
            let variables = [variables[0], variables[1], ("EXPECTED", expected)];
            isolated(test, &variables, || {
                let expected: u32 = std::env::var("EXPECTED").unwrap().parse().unwrap();
                let code = cu!(cuInit(0));
                if code != 0 {
                    assert_eq!(code, expected);
                    return;
                }
                enter();
                let mut free = 0;
                let mut total = 0;
                assert_eq!(cu!(cuMemGetInfo_v2(&raw mut free, &raw mut total)), expected);
            })
        };
        let Some(first) = run(code) else { return };
        assert!(first.status.success(), "{first:#?}");
        let Some(second) = run(&next.to_string()) else { return };
        assert!(second.status.success(), "{second:#?}");
        std::fs::remove_file(&once).unwrap();
    }
}
