//! Tests of workflow runs and the location of data.

use std::time::Duration;

use millrace_proto::admin::{self as api, workflow_step::Run};
use millrace_proto::worker as wire;
use millrace_proto::worker::tensor_part::Part;
use millrace_types::Reason;
use tokio::time::Instant;

use super::{
    apply_workflow, chain, function, id, keep, released, respond, row, rows_of, step, taken, two_in_a_row,
};
use crate::routing::{answer_of, infer, infer_within, until_ready};
use crate::stub::{Call, Stub};
use crate::support::{Cluster, mlp, soon, until};

#[tokio::test]
async fn a_steps_output_stays_at_its_worker_until_the_next_step_has_read_it() {
    let (cluster, mut worker) = two_in_a_row().await;
    let answering = infer(&cluster, "w");
    let first = worker.call().await;
    assert_eq!((first.request.function.as_str(), first.request.inputs[0].data.len()), ("f", 256));
    let hold = first.request.hold.clone().unwrap();
    assert_eq!((hold.answered, first.request.outputs.clone()), (Vec::<String>::new(), vec!["y".to_owned()]));
    keep(first, 7);

    let second = worker.call().await;
    assert_eq!((taken(&second), second.request.inputs[0].data.len()), (vec![7], 0));
    let Some(Part::Held(part)) = &second.request.inputs[0].parts[0].part else { panic!("an object") };
    let object = part.object.clone().unwrap();
    assert!(!object.address.is_empty(), "the next worker gets the owner's address");
    assert_eq!(second.request.hold.clone().unwrap().answered, ["y"], "the output of the workflow");
    second.answer();

    let answer = answer_of(answering).await.unwrap();
    assert_eq!((answer.outputs[0].name.as_str(), &answer.outputs[0].shape[..]), ("y", &[1, 64][..]));
    assert_eq!(released(&mut worker).await, [7]);

    // The controller reports the bytes that the second step read from the first.
    let mut admin = cluster.admin();
    let get = |passed| api::GetWorkflowRequest { name: "w".into(), passed, ..Default::default() };
    let passed = until("the run to be counted", async || {
        let workflow = admin.get_workflow(get(true)).await.unwrap().into_inner();
        workflow.passed.filter(|passed| passed.runs == 1)
    });
    let passed = passed.await;
    let [pair] = &passed.pairs[..] else { panic!("{passed:?}") };
    assert_eq!((pair.from.as_str(), pair.to.as_str(), pair.bytes), ("f", "f", object.bytes));
    assert_eq!(passed.missing, [] as [u64; 0]);
    assert_eq!(admin.get_workflow(get(false)).await.unwrap().into_inner().passed, None);
}

/// D29: a step's worker gets hints about the next steps, and a weaker hint about a conditional step.
#[tokio::test]
async fn a_steps_worker_gets_hints_about_the_next_steps() {
    let cluster = Cluster::start().await;
    for name in ["f", "g", "h"] {
        cluster.deploy(name, &mlp()).await;
    }
    let mut spec = chain("w", &["f", "g", "f", "h"].map(function));
    spec.steps[3].when = "s2.y".into();
    apply_workflow(&cluster, spec).await.unwrap();
    let mut worker = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "w").await;
    let answering = infer(&cluster, "w");
    let gpu = wire::WarmTo::Gpu;
    let host = wire::WarmTo::Host;
    let expected: [&[_]; 4] = [&[("g", gpu), ("h", host)], &[("f", gpu), ("h", host)], &[("h", host)], &[]];
    for expected in expected {
        let call = worker.call().await;
        let next: Vec<_> = call.request.next.iter().map(|it| (it.function.as_str(), it.to())).collect();
        assert_eq!(next, expected);
        assert!(call.request.next.iter().all(|it| it.revision == 1));
        respond(call, rows_of(&[1.0]));
    }
    answer_of(answering).await.unwrap();
}

#[tokio::test]
async fn hints_cross_the_borders_of_nested_workflows() {
    let cluster = Cluster::start().await;
    for name in ["f", "g", "h", "k"] {
        cluster.deploy(name, &mlp()).await;
    }
    apply_workflow(&cluster, chain("inner", &["g", "h"].map(function))).await.unwrap();
    let runs = [function("f"), Run::Workflow("inner".into()), function("k")];
    apply_workflow(&cluster, chain("w", &runs)).await.unwrap();
    let mut worker = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "w").await;
    let answering = infer(&cluster, "w");
    let gpu = wire::WarmTo::Gpu;
    let host = wire::WarmTo::Host;
    let expected: [&[_]; 4] =
        [&[("g", gpu), ("h", host), ("k", host)], &[("h", gpu), ("k", host)], &[("k", gpu)], &[]];
    for expected in expected {
        let call = worker.call().await;
        let next: Vec<_> = call.request.next.iter().map(|it| (it.function.as_str(), it.to())).collect();
        assert_eq!(next, expected);
        respond(call, rows_of(&[1.0]));
    }
    answer_of(answering).await.unwrap();
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_no_object() {
    let (cluster, mut worker) = two_in_a_row().await;
    let answering = infer(&cluster, "w");
    keep(worker.call().await, 5);
    let mut second = worker.call().await;
    answering.abort();
    soon("the cancellation", second.answer.closed()).await;
    assert_eq!(released(&mut worker).await, [5]);
}

/// `outer` is `w` followed by `f`. The output of `w` stays at the worker until `f` reads the output.
#[tokio::test]
async fn a_nested_workflow_passes_its_output_on_as_an_object() {
    let (cluster, mut worker) = two_in_a_row().await;
    let runs = [Run::Workflow("w".into()), function("f")];
    apply_workflow(&cluster, chain("outer", &runs)).await.unwrap();
    let answering = infer(&cluster, "outer");
    keep(worker.call().await, 1);
    keep(worker.call().await, 2);
    assert_eq!(released(&mut worker).await, [1]);
    let third = worker.call().await;
    assert_eq!(taken(&third), [2]);
    // The object is lost between the two steps, so the nested workflow runs again.
    respond(third, wire::InvokeResponse { lost: vec![id(2)], ..Default::default() });
    assert_eq!(released(&mut worker).await, [2]);
    keep(worker.call().await, 3);
    keep(worker.call().await, 4);
    assert_eq!(released(&mut worker).await, [3]);
    let third = worker.call().await;
    assert_eq!(taken(&third), [4]);
    third.answer();
    answer_of(answering).await.unwrap();
    assert_eq!(released(&mut worker).await, [4]);
}

#[tokio::test]
async fn each_row_is_a_separate_call_and_the_answers_are_joined() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut spec = chain("w", &[function("f"), function("f")]);
    spec.steps[1].each = "x".into();
    apply_workflow(&cluster, spec).await.unwrap();
    let mut worker = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "w").await;
    // The same steps run in a nested workflow: all rows belong to the call.
    apply_workflow(&cluster, chain("outer", &[Run::Workflow("w".into())])).await.unwrap();
    until_ready(&cluster, "outer").await;
    for name in ["w", "outer"] {
        each_row(&cluster, &mut worker, name).await;
    }
}

async fn each_row(cluster: &Cluster, worker: &mut Stub, name: &str) {
    let answering = infer(cluster, name);
    respond(worker.call().await, rows_of(&[1.0, 2.0, 3.0]));
    let mut calls = vec![worker.call().await, worker.call().await, worker.call().await];
    // The calls may be answered in any order.
    calls.reverse();
    for call in calls {
        let input = &call.request.inputs[0];
        assert_eq!((input.shape.clone(), input.data.len()), (vec![1, 64], 256));
        let first = f32::from_le_bytes(input.data[..4].try_into().unwrap());
        respond(call, rows_of(&[first * 10.0]));
    }
    let answered = answer_of(answering).await.unwrap();
    assert_eq!(answered.outputs[0].shape, [3, 64]);
    let got = &answered.raw_output_contents[0];
    assert_eq!(got.to_vec(), [row(10.0), row(20.0), row(30.0)].concat());
}

#[tokio::test]
async fn an_objective_is_divided_among_steps_and_both_are_counted() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let seconds = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
    let mut spec = chain("w", &[function("f"), function("f")]);
    spec.slo = Some(api::Slo { deadline: seconds(2_000), percentile: 0.9 });
    spec.steps[1].deadline = seconds(600);
    let kept = apply_workflow(&cluster, spec.clone()).await.unwrap();
    assert_eq!(kept.spec.unwrap().steps, spec.steps);
    let mut worker = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "w").await;
    let answering = infer(&cluster, "w");
    // Neither step has a known duration, so the first gets half of the remaining time. The second step
    // has a separate deadline.
    for most in [1_000, 600] {
        let call = worker.call().await;
        let objective = call.request.objective_micros.unwrap();
        assert!((most - 300) * 1_000_000 < objective && objective <= most * 1_000_000, "{objective} us");
        call.answer();
    }
    answer_of(answering).await.unwrap();
    let text = cluster.metrics().await;
    for line in [
        r#"millrace_workflow_slo_requests_total{tenant="default",workflow="w"} 1"#,
        r#"millrace_workflow_slo_in_time_total{tenant="default",workflow="w"} 1"#,
        r#"millrace_workflow_step_slo_requests_total{tenant="default",workflow="w",step="s1"} 1"#,
        r#"millrace_workflow_step_slo_in_time_total{tenant="default",workflow="w",step="s1"} 1"#,
    ] {
        assert!(text.lines().any(|it| it == line), "{line}: {text}");
    }
    assert!(!text.contains(r#"step="s0""#), "step s0 has no deadline of its own: {text}");

    // The functions' own objectives do not apply to a workflow's calls, nor the workflow's to a direct
    // call.
    let alone = infer(&cluster, "f");
    let call = worker.call().await;
    assert_eq!(call.request.objective_micros, None);
    call.answer();
    answer_of(alone).await.unwrap();
    spec.steps[1].deadline = seconds(0);
    let refused = apply_workflow(&cluster, spec).await.unwrap_err();
    assert!(refused.message().contains("the deadline of step \"s1\" is 0ns"), "{refused}");
}

#[tokio::test]
async fn a_timeout_counts_for_the_step_in_progress() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut spec = chain("w", &[function("f"), function("f")]);
    let deadline = prost_types::Duration { seconds: 0, nanos: 100_000_000 };
    spec.steps.iter_mut().for_each(|step| step.deadline = Some(deadline));
    apply_workflow(&cluster, spec).await.unwrap();
    // The worker never answers.
    let _worker = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "w").await;
    let failure = answer_of(infer_within(&cluster, "w", Duration::from_millis(300))).await.unwrap_err();
    assert_eq!(failure.reason, Reason::TimedOut);
    let text = cluster.metrics().await;
    // The second step never began.
    for (step, requests) in [("s0", 1), ("s1", 0)] {
        for (counter, count) in [("requests", requests), ("in_time", 0)] {
            let line = format!(
                r#"millrace_workflow_step_slo_{counter}_total{{tenant="default",workflow="w",step="{step}"}} {count}"#
            );
            assert!(text.lines().any(|it| it == line), "{line}: {text}");
        }
    }
}

/// Waits without any pending call, so that time counted from too early becomes visible.
async fn a_while() {
    let began = Instant::now();
    until("some time", async || (began.elapsed() > Duration::from_millis(300)).then_some(())).await;
}

/// Checks that a call's remaining time counts from `moment` at the earliest.
fn counted_from(moment: Instant, call: &Call, deadline: Duration) {
    let since = moment.elapsed();
    let left = Duration::from_micros(call.request.objective_micros.unwrap());
    // The microseconds on the wire are rounded down.
    assert!(left + since + Duration::from_micros(1) >= deadline, "{left:?} left after {since:?}");
}

#[tokio::test]
async fn a_steps_deadline_counts_from_the_time_its_condition_is_known() {
    let cluster = Cluster::start().await;
    for name in ["f", "g", "h"] {
        cluster.deploy(name, &mlp()).await;
    }
    let deadline = Duration::from_secs(600);
    let mut spec = chain("w", &["f", "g", "h"].map(function));
    // The step's input comes from f, and the condition from g.
    spec.steps[1] = step("s1", function("g"), "input.x");
    spec.steps[2] = api::WorkflowStep {
        when: "s1.y".into(),
        deadline: Some(prost_types::Duration { seconds: 600, nanos: 0 }),
        ..step("s2", function("h"), "s0.y")
    };
    apply_workflow(&cluster, spec).await.unwrap();
    let mut worker = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "w").await;
    let answering = infer(&cluster, "w");
    let a = worker.call().await;
    let b = worker.call().await;
    let (f, g) = if a.request.function == "f" { (a, b) } else { (b, a) };
    respond(f, rows_of(&[1.0]));
    a_while().await;
    let known = Instant::now();
    respond(g, rows_of(&[1.0]));
    let h = worker.call().await;
    counted_from(known, &h, deadline);
    h.answer();
    answer_of(answering).await.unwrap();
}

#[tokio::test]
async fn the_deadline_of_a_repeated_step_counts_from_the_loss() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let deadline = Duration::from_secs(600);
    let mut inner = chain("inner", &[function("f")]);
    let mut direct = chain("direct", &[function("f"), function("f")]);
    for spec in [&mut inner, &mut direct] {
        spec.steps[0].deadline = Some(prost_types::Duration { seconds: 600, nanos: 0 });
    }
    // A lost output of a nested workflow is produced again by a run of the whole nested workflow.
    let nested = chain("nested", &[Run::Workflow("inner".into()), function("f")]);
    for spec in [direct, inner, nested] {
        apply_workflow(&cluster, spec).await.unwrap();
    }
    let mut worker = Stub::start(&cluster, "n1").await;
    for (name, first) in [("direct", 1), ("nested", 3)] {
        until_ready(&cluster, name).await;
        let answering = infer(&cluster, name);
        keep(worker.call().await, first);
        let second = worker.call().await;
        a_while().await;
        let lost = Instant::now();
        respond(second, wire::InvokeResponse { lost: vec![id(first)], ..Default::default() });
        let again = worker.call().await;
        counted_from(lost, &again, deadline);
        keep(again, first + 1);
        worker.call().await.answer();
        answer_of(answering).await.unwrap();
    }
}
