//! Tests outputs that stay in the GPU's memory as objects, and runs that read them in place.

use std::os::fd::OwnedFd;

use millrace_model::synth;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::*;

use crate::object_support::{AT, Part, ROWS, Y_BYTES, file, memory_of, object, on, placed, whole};
use crate::support::{Executor, Model, PAGE, numbers, send, tensor, x};

/// Returns a model that maps each input row to an output row. The output is larger than an inline tensor.
fn mlp() -> (Model, Executor) {
    let model = Model::new(synth::mlp());
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    (model, executor)
}

/// Returns the output of a run of `x`, and the output of a run of that output, both sent through the host.
fn through_the_host(executor: &mut Executor) -> [Vec<u8>; 2] {
    executor.run(1, 1, 1, x(&[ROWS, 64]));
    let first = executor.ran(1).unwrap().bytes();
    let input = file(&first);
    let contents = Some(tensor::Contents::ContentsFd(0));
    let inputs = vec![Tensor { contents, ..tensor("x", "FP32", &[ROWS, 64], vec![]) }];
    let run = Run { run: 2, program: 1, generation: 1, inputs, ..Run::default() };
    send(&executor.socket, Command::Run(run), vec![input]);
    [first, executor.ran(2).unwrap().bytes()]
}

#[test]
fn a_kept_output_read_in_place_gives_the_same_result_as_through_the_host() {
    let (_model, mut executor) = mlp();
    let [first, second] = through_the_host(&mut executor);
    let done = executor.keep(3, x(&[ROWS, 64]));
    assert_eq!(done.outputs[0].contents, Some(tensor::Contents::KeptBytes(Y_BYTES)));
    assert_eq!((&done.outputs[0].shape[..], &done.outputs[0].datatype[..]), (&[ROWS, 64][..], "FP32"));
    executor.place(placed(5, Y_BYTES, Some(whole(3)))).unwrap();
    executor.send(Command::DropOutputs(DropOutputs { run: 3 }));
    assert_eq!(memory_of(&executor, AT, Y_BYTES), first);
    for run in 4..6 {
        executor.run(run, 1, 1, on(object(5)));
        assert_eq!(executor.ran(run).unwrap().bytes(), second);
    }
    // The run reads the GPU's memory, so a change there is visible in the result.
    let memory = executor.memory.share().unwrap();
    rustix::io::pwrite(&memory, &numbers(16), AT).unwrap();
    executor.run(6, 1, 1, on(object(5)));
    let changed = executor.ran(6).unwrap().bytes();
    assert_ne!(changed[..256], second[..256]);
    assert_eq!(changed[256..], second[256..], "only the first row was changed");
    executor.said_no_more();
}

#[test]
fn a_small_output_is_sent_inline_although_it_is_to_be_kept() {
    let (_model, mut executor) = mlp();
    let done = executor.keep(1, x(&[1, 64]));
    assert!(matches!(done.outputs[0].contents, Some(tensor::Contents::Inline(_))));
    let unknown = executor.copy_out(Part::Output(OutputPart { bytes: 256, ..whole(1) })).unwrap_err();
    assert!(unknown.contains("not kept"), "{unknown}");
}

#[test]
fn copies_of_an_output_and_of_an_object_to_the_host_have_its_bytes() {
    let (_model, mut executor) = mlp();
    let [first, _] = through_the_host(&mut executor);
    executor.keep(3, x(&[ROWS, 64]));
    executor.place(placed(5, Y_BYTES, Some(whole(3)))).unwrap();
    assert_eq!(executor.copy_out(Part::Output(whole(3))), Ok(first.clone()));
    assert_eq!(executor.copy_out(Part::Object(object(5))), Ok(first.clone()));
    let offset = 100;
    let bytes = Y_BYTES - 1000;
    let part = &first[offset as usize..(offset + bytes) as usize];
    let copied = executor.copy_out(Part::Output(OutputPart { offset, bytes, ..whole(3) }));
    assert_eq!(copied.as_deref(), Ok(part));
    let copied = executor.copy_out(Part::Object(ObjectPart { offset, bytes, ..object(5) }));
    assert_eq!(copied.as_deref(), Ok(part));
}

#[test]
fn rows_of_a_batch_are_placed_separately_and_batched_again() {
    let (_model, mut executor) = mlp();
    let [_, second] = through_the_host(&mut executor);
    // Two requests share the rows of `x`. The larger request exceeds the limit of inline tensors.
    let rows = [20, ROWS - 20];
    let all = numbers((ROWS * 64) as usize);
    let cut = (rows[0] * 256) as usize;
    let part = |rows, bytes: &[u8]| tensor("x", "FP32", &[rows, 64], bytes.to_vec());
    let inputs = vec![part(rows[0], &all[..cut]), part(rows[1], &all[cut..])];
    executor.send(Command::Run(Run {
        run: 3,
        program: 1,
        generation: 1,
        inputs,
        members: 2,
        kept: vec!["y".to_owned()],
        ..Run::default()
    }));
    executor.ran(3).unwrap();
    let cut = cut as u64;
    let halves = [(5, 0, cut, AT), (6, cut, Y_BYTES - cut, AT + (1 << 20))];
    for (object, offset, bytes, at) in halves {
        let extents =
            vec![Extent { range_offset: 0, device_offset: at, bytes: bytes.next_multiple_of(PAGE) }];
        let output = Some(OutputPart { offset, bytes, ..whole(3) });
        executor.place(PlaceObject { object, bytes, extents, output, ..PlaceObject::default() }).unwrap();
    }
    executor.send(Command::DropOutputs(DropOutputs { run: 3 }));
    let inputs = halves.map(|(object, _, bytes, _)| {
        let contents = Some(tensor::Contents::Object(ObjectPart { object, offset: 0, bytes }));
        Tensor { contents, ..tensor("x", "FP32", &[bytes as i64 / 256, 64], vec![]) }
    });
    let run = Run { run: 4, program: 1, generation: 1, inputs: inputs.to_vec(), ..Run::default() };
    executor.send(Command::Run(Run { members: 2, ..run.clone() }));
    assert_eq!(executor.ran(4).unwrap().bytes(), second);
    // One of the two objects, batched with a row from the host.
    let row = tensor("x", "FP32", &[1, 64], numbers(64));
    let inputs = vec![inputs[0].clone(), row];
    executor.send(Command::Run(Run { members: 2, inputs, ..run }));
    assert_eq!(executor.ran(4).unwrap().bytes()[..cut as usize], second[..cut as usize]);
}

#[test]
fn a_part_of_an_object_is_an_input() {
    let (_model, mut executor) = mlp();
    let [_, second] = through_the_host(&mut executor);
    executor.keep(3, x(&[ROWS, 64]));
    executor.place(placed(5, Y_BYTES, Some(whole(3)))).unwrap();
    let part = ObjectPart { object: 5, offset: 256, bytes: 512 };
    let contents = Some(tensor::Contents::Object(part));
    executor.run(4, 1, 1, vec![Tensor { contents, ..tensor("x", "FP32", &[2, 64], vec![]) }]);
    let float = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    let rows = executor.ran(4).unwrap().bytes();
    assert_eq!(rows.len(), 512);
    for (one, many) in rows.chunks(4).map(float).zip(second[256..768].chunks(4).map(float)) {
        assert!((one - many).abs() < 1e-5, "{one} and {many}");
    }
}

#[test]
fn int64_objects_are_read_as_inputs() {
    let tiny = synth::Encoder { layers: 1, hidden: 32, heads: 2, vocabulary: 100, ..synth::Encoder::BASE };
    let model = Model::new(synth::bert_like(synth::Encoder { positions: 16, ..tiny }));
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    let ids: Vec<u8> = [1i64, 2, 99].into_iter().flat_map(i64::to_le_bytes).collect();
    let input = tensor("input_ids", "INT64", &[1, 3], ids.clone());
    executor.run(1, 1, 1, vec![input.clone()]);
    let answer = executor.ran(1).unwrap().bytes();
    executor.place_with_host(placed(5, 24, None), file(&ids)).unwrap();
    let batch = executor.grant_object(5, 0..24, None);
    executor.copied(batch).unwrap();
    let contents = Some(tensor::Contents::Object(ObjectPart { object: 5, offset: 0, bytes: 24 }));
    executor.run(2, 1, 1, vec![Tensor { contents, ..input }]);
    assert_eq!(executor.ran(2).unwrap().bytes(), answer);
}

#[test]
fn an_object_copied_from_the_host_is_usable_only_when_complete() {
    let (_model, mut executor) = mlp();
    let [first, second] = through_the_host(&mut executor);
    let host: OwnedFd = file(&first);
    executor.place_with_host(placed(5, Y_BYTES, None), host).unwrap();
    let half = Y_BYTES / 2 + 1;
    let batch = executor.grant_object(5, 0..half, None);
    assert_eq!(executor.copied(batch).unwrap().bytes, half);
    executor.run(3, 1, 1, on(object(5)));
    let (failure, message) = executor.ran(3).unwrap_err();
    assert_eq!(failure, RunFailure::NotResident);
    assert!(message.contains("object 5 is not all loaded"), "{message}");
    let batch = executor.grant_object(5, half..Y_BYTES, None);
    executor.copied(batch).unwrap();
    executor.run(4, 1, 1, on(object(5)));
    assert_eq!(executor.ran(4).unwrap().bytes(), second);
}

#[test]
fn an_object_is_copied_from_the_memory_of_another_gpu() {
    let (_model, mut source) = mlp();
    let [_, second] = through_the_host(&mut source);
    source.keep(3, x(&[ROWS, 64]));
    source.place(placed(5, Y_BYTES, Some(whole(3)))).unwrap();
    let (_model, mut target) = mlp();
    target.add_peer(&source.memory, 7);
    target.place(placed(8, Y_BYTES, None)).unwrap();
    let extents = placed(5, Y_BYTES, None).extents;
    let peer = PeerSource { gpu: 1, incarnation: 7, extents };
    let refused = target.grant_object(8, 0..Y_BYTES, Some(PeerSource { incarnation: 6, ..peer.clone() }));
    assert_eq!(target.copy_failure(refused), CopyFailure::Peer);
    let batch = target.grant_object(8, 0..Y_BYTES, Some(peer));
    assert_eq!(target.copied(batch).unwrap().bytes, Y_BYTES);
    target.run(3, 1, 1, on(object(8)));
    assert_eq!(target.ran(3).unwrap().bytes(), second);
}

#[test]
fn a_freed_object_is_unmapped_after_its_last_run() {
    let (model, mut executor) = mlp();
    let [_, second] = through_the_host(&mut executor);
    executor.keep(3, x(&[ROWS, 64]));
    executor.place(placed(5, Y_BYTES, Some(whole(3)))).unwrap();
    executor.unmap(1, 1);
    executor.map(&model, 1, 2, 0);
    // The first run waits for its weights and uses the object; the second run waits behind it.
    executor.run(4, 1, 2, on(object(5)));
    executor.run(5, 1, 2, on(object(5)));
    executor.send(Command::FreeObject(FreeObject { object: 5 }));
    executor.run(6, 1, 2, on(object(5)));
    assert_eq!(executor.run_failure(6), RunFailure::NotResident);
    let freed = |event: &Event| (*event == Event::ObjectFreed(ObjectFreed { object: 5 })).then_some(());
    assert_eq!(executor.said(freed), [], "earlier runs still use the object");
    let batch = executor.grant(1, 2, &model.all());
    executor.copied(batch).unwrap();
    for run in [4, 5] {
        assert_eq!(executor.ran(run).unwrap().bytes(), second);
    }
    executor.expect(|event| freed(&event));
    executor.run(7, 1, 2, on(object(5)));
    let (failure, message) = executor.ran(7).unwrap_err();
    assert_eq!(failure, RunFailure::NotResident);
    assert!(message.contains("object 5 is not there") || message.contains("object 5 is freed"), "{message}");
    // The object's memory and id can be used again. Freeing an object that does not exist is no error.
    executor.place(placed(5, Y_BYTES, Some(whole(3)))).unwrap();
    executor.free(5);
    executor.free(9);
    executor.said_no_more();
}

#[test]
fn a_cancelled_run_releases_its_object_and_a_copy_keeps_it_until_done() {
    let (model, mut executor) = mlp();
    executor.keep(3, x(&[ROWS, 64]));
    executor.place(placed(5, Y_BYTES, Some(whole(3)))).unwrap();
    let behind = executor.begin_granted(Part::Output(whole(3)));
    executor.place(PlaceObject { extents: elsewhere(), ..placed(6, Y_BYTES, Some(whole(3))) }).unwrap();
    executor.unmap(1, 1);
    executor.map(&model, 1, 2, 0);
    executor.run(4, 1, 2, x(&[1, 64]));
    executor.run(5, 1, 2, on(object(5)));
    executor.send(Command::FreeObject(FreeObject { object: 5 }));
    executor.send(Command::Cancel(Cancel { run: 5 }));
    executor.expect(|event| (event == Event::ObjectFreed(ObjectFreed { object: 5 })).then_some(()));
    // The copy waits behind a batch with a window in the far future.
    let never = executor.grant_out(&behind, 0..1, u64::MAX - 1..u64::MAX);
    let copy = executor.begin_copy_out(Part::Object(object(6)));
    executor.send(Command::FreeObject(FreeObject { object: 6 }));
    executor.send(Command::Revoke(Revoke { transfer: 1, batch: never }));
    assert_eq!(executor.copied_out(copy).unwrap().len() as u64, Y_BYTES);
    executor.expect(|event| (event == Event::ObjectFreed(ObjectFreed { object: 6 })).then_some(()));
}

fn elsewhere() -> Vec<Extent> {
    vec![Extent { range_offset: 0, device_offset: AT + (1 << 20), bytes: Y_BYTES.next_multiple_of(PAGE) }]
}
