//! The helper kernels, and the SMs on which they run.
#![allow(unsafe_code, reason = "calls the driver")]

use std::ptr::null_mut;

use cudarc::driver::sys;

use crate::child::isolated;
use crate::device::*;

/// Reads 64-bit words of the device.
fn words(at: u64, count: usize) -> Vec<u64> {
    bytes(at, count * 8).as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

#[test]
fn kernels_give_the_results_of_their_descriptions() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let at = mapped(1);
        let out = mapped(1);
        let stream = stream();
        let module = module();
        let run = |name, blocks, arguments: &[u64]| {
            ok!(cuMemsetD8Async(out, 0, 4096, stream));
            launch(module, name, blocks, 64, stream, arguments);
            ok!(cuStreamSynchronize(stream));
            words(out, 2)
        };
        run(c"millrace_pattern", 1, &[at, 1024, 7]);
        // mix(7) of splitmix64's finaliser.
        assert_eq!(
            words(at, 1),
            [0x63cb_e1e4_5932_0dd7_u64.wrapping_add(mix(7)).wrapping_sub(0x63cb_e1e4_5932_0dd7)]
        );
        assert_eq!(run(c"millrace_check", 1, &[at, 1024, 7, out]), [0, 0]);
        assert_eq!(run(c"millrace_check", 1, &[at, 1024, 8, out])[0], 128);
        let hashes = run(c"millrace_hash", 2, &[at, 512, out]);
        assert!(hashes[0] != hashes[1] && hashes[0] != 0);
        let fold = words(at, 128).into_iter().fold(0, |fold, word| fold ^ word);
        assert_eq!(run(c"millrace_touch", 1, &[at, 1024, 3, out]), [fold, 0]);
        assert_eq!(run(c"millrace_touch", 1, &[at, 1024, 2, out]), [0, 0]);
        // Each thread flips a single word.
        run(c"millrace_xor", 1, &[at, 1024, 1]);
        assert_eq!(run(c"millrace_check", 1, &[at, 1024, 7, out])[0], 32);
        run(c"millrace_fma", 1, &[out, 0]);
        let sums = bytes(out, 8);
        assert_eq!(sums, [6.0_f32.to_le_bytes(), 10.0_f32.to_le_bytes()].concat());
        let flag = pinned(4);
        flag.fill(0);
        let address = flag.as_ptr().expose_provenance() as u64;
        launch(module, c"millrace_flag", 1, 1, stream, &[address, 9]);
        launch(module, c"millrace_await", 1, 1, stream, &[address, 9, u64::MAX]);
        launch(module, c"millrace_await", 1, 1, stream, &[address, 8, 1000]);
        ok!(cuStreamSynchronize(stream));
        assert_eq!(flag, [9, 0, 0, 0]);
        ok!(cuModuleUnload(module));
    }) else {
        return;
    };
    ended.report();
}

fn mix(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[test]
fn only_entries_with_a_body_are_found() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let module = module();
        let mut function = null_mut();
        assert_eq!(cu!(cuModuleGetFunction(&raw mut function, module, c"another".as_ptr())), 500);
        assert_eq!(cu!(cuModuleGetFunction(&raw mut function, module, c"absent".as_ptr())), 500);
        let text = c".version 7.0\n.target sm_75\n.entry millrace_spin(.param .u32 ns) { ret; }";
        let mut other = null_mut();
        ok!(cuModuleLoadData(&raw mut other, text.as_ptr().cast()));
        assert_eq!(cu!(cuModuleGetFunction(&raw mut function, other, c"millrace_spin".as_ptr())), 1);
        assert_eq!(cu!(cuModuleLoadData(&raw mut other, c"no text".as_ptr().cast())), 218);
        assert_eq!(cu!(cuModuleLoadData(&raw mut other, c"\x7fELF".as_ptr().cast())), 209);
        ok!(cuModuleGetFunction(&raw mut function, module, c"millrace_spin".as_ptr()));
        let parameter = |index| {
            let mut offset = 0;
            let mut bytes = 0;
            let code = cu!(cuFuncGetParamInfo(function, index, &raw mut offset, &raw mut bytes));
            (code, offset, bytes)
        };
        assert_eq!([parameter(0), parameter(1)], [(0, 0, 8), (1, 0, 0)]);
        let launch = |grid_y, threads| {
            cu!(cuLaunchKernel(function, 1, grid_y, 1, threads, 1, 1, 0, null_mut(), null_mut(), null_mut()))
        };
        assert_eq!(launch(2, 1), 1);
        assert_eq!(launch(1, 1025), 1);
        assert_eq!(launch(1, 1), 1);
    }) else {
        return;
    };
    ended.report();
    ended.said(&["the double has no body for another"]);
    ended.said(&["millrace_spin has parameters of [4] bytes"]);
}

#[test]
fn a_kernel_that_reads_unmapped_memory_ends_the_context() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let at = mapped(1);
        let stream = stream();
        let module = module();
        let event = event();
        let mut gate = Gate::close(stream);
        launch(module, c"millrace_pattern", 1, 1, stream, &[at, BLOCK as u64 + 8, 7]);
        ok!(cuEventRecord(event, stream));
        gate.open();
        assert_eq!(cu!(cuEventSynchronize(event)), 700);
        assert_eq!(cu!(cuMemUnmap(at, BLOCK)), 700);
    }) else {
        return;
    };
    ended.report();
    ended.said(&["cuLaunchKernel (call 1)", "may not write"]);
}

#[test]
fn green_contexts_run_on_their_own_sms() {
    let Some(ended) = isolated(this_test!(), &[], || {
        enter();
        let zero = sys::CUdevResource {
            type_: sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_INVALID,
            _internal_padding: [0; 92],
            __bindgen_anon_1: sys::CUdevResource_st__bindgen_ty_1 { _oversize: [0; 48] },
        };
        let (mut all, mut rest, mut parts) = (zero, zero, [zero; 2]);
        let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        let mut count = 2;
        ok!(cuDeviceGetDevResource(0, &raw mut all, kind));
        assert_eq!(
            cu!(cuDevSmResourceSplitByCount(
                parts.as_mut_ptr(),
                &raw mut count,
                &raw const zero,
                &raw mut rest,
                0,
                9
            )),
            914
        );
        ok!(cuDevSmResourceSplitByCount(
            parts.as_mut_ptr(),
            &raw mut count,
            &raw const all,
            &raw mut rest,
            0,
            9
        ));
        let sms = |resource: &sys::CUdevResource| {
            // SAFETY: the resource is one of SMs.
            unsafe { resource.__bindgen_anon_1.sm }.smCount
        };
        assert_eq!((count, sms(&all), sms(&parts[0]), sms(&parts[1]), sms(&rest)), (2, 132, 16, 16, 100));
        let out = mapped(1);
        let module = module();
        for (at, part) in parts.iter_mut().enumerate() {
            let mut description = null_mut();
            let mut green = null_mut();
            let mut stream = null_mut();
            ok!(cuDevResourceGenerateDesc(&raw mut description, part, 1));
            ok!(cuGreenCtxCreate(&raw mut green, description, 0, 1));
            ok!(cuGreenCtxStreamCreate(&raw mut stream, green, 1, 0));
            launch(module, c"millrace_smid", 32, 1, stream, &[out, 1000]);
            ok!(cuStreamSynchronize(stream));
            let found = bytes(out, 128);
            let found: Vec<u32> = found.as_chunks::<4>().0.iter().map(|sm| u32::from_le_bytes(*sm)).collect();
            let own = at as u32 * 16..at as u32 * 16 + 16;
            assert!(found.iter().all(|sm| own.contains(sm)), "{found:?}");
            let mut context = null_mut();
            ok!(cuCtxFromGreenCtx(&raw mut context, green));
            ok!(cuGreenCtxDestroy(green));
            assert_eq!(cu!(cuCtxSetCurrent(context)), 201);
            assert_eq!(cu!(cuStreamSynchronize(stream)), 709);
            ok!(cuStreamDestroy_v2(stream));
        }
    }) else {
        return;
    };
    let left = &ended.report()["left"];
    assert_eq!((&left["green_contexts"], &left["streams"]), (&0.into(), &0.into()));
}
