use super::*;

const WHOLE: &str = "\
name: mine
about: kill the leader
functions:
- {name: everywhere, model: mlp, replicas: 2}
rounds: 2
round:
- fault: {kill: leader}
- await: another-leader
- promise: {await: service, within: 2s, source: me}
- pause: 1500ms
- repair
- await: whole
invariants: [answered, right, healthy, gone]
";

const STORM: &str = "\
name: mine
about: many at once
cluster: {controllers: 1, workers: 1, gpus: 4}
functions:
- {name: swapped, model: tiny-cnn, count: 200}
load: requests
lasts: 5m
storm:
- {every: 2s, fault: {kill: executor}}
- {every: 5s..9s, fault: {slow: {delay: 5ms..30ms}}, for: 2s}
invariants: [answered, right, healthy, gone, flat, returned]
";

fn refusal(text: &str) -> String {
    format!("{:#}", ScenarioSpec::parse("mine.yaml", text).unwrap_err())
}

#[test]
fn a_file_with_a_round_or_a_storm_is_parsed() {
    let spec = ScenarioSpec::parse("mine.yaml", WHOLE).unwrap();
    assert_eq!((spec.rounds.map(NonZeroU32::get), spec.round.len()), (Some(2), 6));
    assert!(!spec.cuts() && !spec.slows() && !spec.is_injected() && !spec.fails_devices());
    let storm = ScenarioSpec::parse("mine.yaml", STORM).unwrap();
    assert_eq!((storm.cluster.gpus, storm.functions[0].count.get()), (4, 200));
    assert!(storm.slows() && !storm.cuts());
}

#[test]
fn an_unknown_key_is_refused_with_its_line() {
    for (from, to, line) in [
        ("rounds: 2", "roundz: 2", "line 5"),
        ("model: mlp,", "modle: mlp,", "line 4"),
        ("kill: leader", "kil: leader", "line 7"),
        ("within: 2s,", "without: 2s,", "line 9"),
        ("kill: leader", "kill: ledaer", "line 7"),
        ("1500ms", "a while", "line 10"),
    ] {
        let refusal = refusal(&WHOLE.replace(from, to));
        assert!(
            refusal.starts_with("mine.yaml is not a scenario") && refusal.contains(line),
            "{to}: {refusal}"
        );
    }
}

#[test]
fn an_inconsistent_scenario_is_refused_with_the_reason() {
    let whole: &[(&str, &str, &str)] = &[
        ("name: mine", "name: Mine!", "is not a name"),
        ("rounds: 2\n", "", "takes rounds"),
        ("rounds: 2", "lasts: 2m", "takes rounds"),
        ("rounds: 2", "rounds: 2\nplays: torn-store", "exactly one"),
        ("functions:", "cluster: {controllers: 2}\nfunctions:", "1, 3 or 5"),
        ("functions:", "cluster: {controllers: 1}\nfunctions:", "step 2 of the round: another leader"),
        ("replicas: 2", "replicas: 3", "3 of 2 workers"),
        ("name: everywhere", "name: register-1", "harness's own"),
        ("kill: leader", "kill: controller-4", "step 1 of the round: there is no controller 4"),
        ("kill: leader", "starve: leader", "starve is for a worker"),
        ("kill: leader", "restart: executor", "restart is for"),
        ("another-leader", "lost", "killed or cut off"),
        ("right, ", "", "right has to hold"),
        ("gone]", "gone, flat]", "a single worker"),
    ];
    for (from, to, expected) in whole {
        let refusal = refusal(&WHOLE.replace(from, to));
        assert!(refusal.contains(expected), "{to}: {refusal}");
    }
    let storm: &[(&str, &str, &str)] = &[
        ("lasts: 5m\n", "", "takes lasts"),
        ("every: 2s,", "every: 1ms,", "stream 1 of the storm: every"),
        (", for: 2s", "", "stream 2 of the storm: this fault takes a for"),
        ("{kill: executor}}", "{kill: executor}, for: 1s}", "takes no for"),
        ("{kill: executor}}", "{restart: worker}}", "a worker that keeps running"),
        ("gone,", "gone, linearizable,", "no client writes"),
    ];
    for (from, to, expected) in storm {
        let refusal = refusal(&STORM.replace(from, to));
        assert!(refusal.contains(expected), "{to}: {refusal}");
    }
}

#[test]
fn hostile_clients_need_a_duration_controllers_and_a_function_to_attack() {
    let text = crate::scenario::library::text("hostile-clients");
    let spec = ScenarioSpec::parse("hostile-clients", text).unwrap();
    assert!(spec.is_timed() && spec.lasts.is_some());
    for (from, to, expected) in [
        ("lasts: 3m", "rounds: 3", "takes lasts"),
        ("name: everywhere, model: mlp", "name: everywhere, model: tiny-cnn", "model mlp"),
        ("cluster: {workers: 2}", "cluster: {controllers: 1}", "3 controllers"),
    ] {
        assert!(text.contains(from), "{from}");
        let refusal = refusal(&text.replace(from, to));
        assert!(refusal.contains(expected), "{to}: {refusal}");
    }
}

#[test]
fn the_invariant_counted_and_sequences_require_each_other() {
    let sequences = "functions:\n- {name: everywhere, model: mlp, replicas: 2}\nsequences:\n";
    let with = |counter: &str| {
        let text = WHOLE.replace("gone]", "gone, counted]");
        text.replace(
            "functions:\n- {name: everywhere, model: mlp, replicas: 2}\n",
            &format!("{sequences}{counter}\n"),
        )
    };
    let spec = ScenarioSpec::parse("mine.yaml", &with("- {name: small, width: 4}")).unwrap();
    assert_eq!((spec.sequences[0].name.as_str(), spec.sequences[0].width.get()), ("small", 4));
    for (counter, why) in [
        ("- {name: everywhere, width: 4}", "is defined twice"),
        ("- {name: poison, width: 4}", "the harness's own"),
        ("- {name: small, width: 262145}", "wider than"),
        ("- {name: small, width: 0}", "line"),
    ] {
        let refusal = refusal(&with(counter));
        assert!(refusal.contains(why), "{counter}: {refusal}");
    }
    assert!(refusal(&WHOLE.replace("gone]", "gone, counted]")).contains("counted requires sequences"));
    let unjudged = with("- {name: small, width: 4}").replace(", counted]", "]");
    assert!(refusal(&unjudged).contains("counted requires sequences"));
}
