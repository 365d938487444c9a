//! `millrace sim` as its users run it.

use crate::support::{Run, Sandbox};

#[tokio::test]
async fn policies_are_compared_and_equal_seeds_give_equal_output() {
    let sandbox = Sandbox::new();
    let line = "sim --functions 16 --minutes 1 --deadline 80ms --policy fifo,torpor,fifo --seed 7";
    let run = sandbox.run(line).await;
    assert_eq!(run.code, 0, "{run:?}");
    let lines: Vec<&str> = run.stdout.lines().collect();
    assert_eq!(lines.len(), 3, "a policy that is named twice runs once: {}", run.stdout);
    assert!(lines[0].starts_with("POLICY") && lines[0].ends_with("COMPLIANT"), "{}", lines[0]);
    assert!(lines[1].starts_with("fifo") && lines[2].starts_with("torpor"), "{}", run.stdout);
    assert!(run.stderr.contains("16 functions over 1m on 1 node of 4 GPUs"), "{}", run.stderr);
    assert_eq!(sandbox.run(line).await.stdout, run.stdout);
}

#[tokio::test]
async fn models_load_faster_over_the_links_of_other_gpus() {
    let sandbox = Sandbox::new();
    sandbox.write("models.yaml", "- {name: a, weights: 2GB, run: 1ms}\n");
    let mut means = Vec::new();
    for links in ["own", "all"] {
        let line = format!(
            "sim --topology dgx-v100 --models models.yaml --functions 80 --pattern sporadic --rate 60 \
             --minutes 1 --host-links {links} -o json"
        );
        let run = sandbox.run(&line).await;
        assert_eq!(run.code, 0, "{line}: {run:?}");
        let rows: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
        means.push(rows[0]["meanMs"].as_f64().unwrap());
    }
    assert!(means[1] < means[0] / 2.0, "{means:?}");
}

#[tokio::test]
async fn tables_and_plots_are_written_into_the_given_folder() {
    let sandbox = Sandbox::new();
    sandbox.write("models.yaml", "- {name: a, weights: 100MB, run: 5ms}\n");
    sandbox
        .write("trace.csv", "HashOwner,HashApp,HashFunction,Trigger,1,2\no,a,f,http,30,9\no,a,g,http,10,1\n");
    let line =
        "sim --models models.yaml --trace trace.csv --minutes 2 --nodes 2 --policy lb --out results -o json";
    let run = sandbox.run(line).await;
    assert_eq!(run.code, 0, "{run:?}");
    let rows: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((&rows[0]["policy"], &rows[0]["requests"]), (&"lb".into(), &50.into()));
    let read = |name: &str| std::fs::read_to_string(sandbox.path().join("results").join(name)).unwrap();
    assert_eq!(read("requests-lb.csv").lines().count(), 51);
    assert!(read("latency.svg").starts_with("<svg") && read("summary.json").contains("\"p99Ms\""));
    assert!(read("gpus.svg").starts_with("<svg"));
    let csv = read("summary.csv");
    let (header, line) = csv.split_once('\n').unwrap();
    let field = |name: &str| {
        let place = header.split(',').position(|it| it == name).unwrap();
        line.trim().split(',').nth(place).unwrap().to_owned()
    };
    assert_eq!((field("policy"), field("requests"), field("failed")), ("lb".into(), "50".into(), "0".into()));
    let off: f64 = field("estimates_off_ratio").parse().unwrap();
    assert!((0.0..1.0).contains(&off), "{off}");
    let run_told = &rows[0]["predictions"][0];
    assert!(run_told["count"].as_u64().unwrap() > 0 && run_told["errorRatio"].is_number(), "{}", rows[0]);
}

#[tokio::test]
async fn every_shape_of_a_workload_is_accepted() {
    let sandbox = Sandbox::new();
    sandbox.write("rates.csv", "30,9\n10,1\n");
    for shape in [
        "--pattern zipf --top 1",
        "--pattern sporadic",
        "--pattern periodic",
        "--pattern bursty",
        "--rates rates.csv",
    ] {
        let line = format!("sim --functions 4 --minutes 1 --rate 60 {shape} -o json");
        let run = sandbox.run(&line).await;
        assert_eq!(run.code, 0, "{line}: {run:?}");
        let rows: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
        let requests = rows[0]["requests"].as_u64().unwrap();
        assert!((1..=200).contains(&requests), "{line}: {requests}");
    }
}

#[tokio::test]
async fn tenants_have_their_own_rows_and_their_caps_apply() {
    let sandbox = Sandbox::new();
    let line = "sim --gpus 1 --functions 12 --minutes 1 --rate 600 --pattern sporadic --tenants quiet=4 --tenants noisy=8,times=10";
    let p99 = |run: &Run| {
        let rows: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
        let tenants = rows[0]["tenants"].as_array().unwrap().clone();
        let names: Vec<_> = tenants.iter().map(|it| it["tenant"].as_str().unwrap().to_owned()).collect();
        assert_eq!(names, ["noisy", "quiet"]);
        tenants[1]["p99Ms"].as_f64().unwrap()
    };
    let free = sandbox.run(&format!("{line} -o json")).await;
    let capped = sandbox.run(&format!("{line},gpus-max=1 -o json")).await;
    assert!(p99(&capped) < p99(&free) / 2.0, "{} and {}", capped.stdout, free.stdout);
    let run = sandbox.run(line).await;
    assert!(run.stdout.contains("TENANT   REQUESTS"), "{}", run.stdout);
}

#[tokio::test]
async fn invalid_simulations_are_refused_with_advice() {
    let sandbox = Sandbox::new();
    sandbox.write("models.yaml", "- {name: huge, weights: 90GB, run: 5ms}\n");
    sandbox.write("trace.csv", "a,b\n1,2\n");
    sandbox.write("idle.csv", "0,0\n");
    for (line, code, says) in [
        ("sim --models none.yaml", 2, "--models none.yaml"),
        ("sim --trace trace.csv", 2, "HashOwner"),
        ("sim --policy lifo", 2, "lalb-o3"),
        ("sim --functions 4 --tenants acme=5", 2, "--functions"),
        ("sim --tenants acme=4,gpus=2", 2, "gpus-max"),
        ("sim --deadline 80ms --percentile 1", 2, "--percentile"),
        ("sim --models models.yaml", 1, "use a smaller model, or add a worker with larger GPUs"),
        ("sim --trace trace.csv --pattern zipf", 2, "cannot be used with"),
        ("sim --pattern zipf --top 0", 2, "0 is not in 1.."),
        ("sim --pattern bursty --rate 1 --minutes 1", 2, "the workload has no requests"),
        ("sim --rates idle.csv", 2, "the workload has no requests"),
    ] {
        let run = sandbox.run(line).await;
        assert_eq!(run.code, code, "{line}: {run:?}");
        assert!(run.stderr.contains(says), "{line}: {}", run.stderr);
    }
}

#[tokio::test]
async fn functions_have_the_papers_deadlines_unless_a_deadline_is_given() {
    let sandbox = Sandbox::new();
    for (options, bound) in [
        ("", 8),
        ("--deadline paper", 8),
        ("--deadline 80ms", 8),
        ("--deadline none", 0),
        ("--models lalb", 0),
        ("--models lalb --deadline 9s", 8),
    ] {
        let run = sandbox.run(&format!("sim --functions 8 --minutes 1 {options} -o json")).await;
        assert_eq!(run.code, 0, "{options}: {run:?}");
        let rows: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
        assert_eq!(rows[0]["withObjective"], bound, "{options}");
    }
    let run = sandbox.run("sim --models lalb --deadline paper").await;
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("--models torpor only: set a time such as 80ms"), "{}", run.stderr);
    for none in ["--models lalb", "--deadline none"] {
        let run = sandbox.run(&format!("sim {none} --percentile 0.9")).await;
        assert_eq!(run.code, 2, "{none}: {run:?}");
        assert!(run.stderr.contains("set --deadline, such as 80ms"), "{}", run.stderr);
    }
}
