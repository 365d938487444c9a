//! `millrace top` with real processes.

use std::process::Stdio;

use crate::running::{RunningCluster, eventually, millrace, repository};

const IMAGE: &str = "examples/digits/images/digit-3.png";

/// Returns the cell under a heading in a pane's row, from a printed sample.
fn cell<'a>(look: &'a str, pane: &str, heading: &str, id: &str) -> Option<&'a str> {
    let lines = look.lines().skip_while(|line| *line != pane);
    let mut lines = lines.skip(1).take_while(|line| !line.is_empty());
    let at =
        lines.next()?.split("  ").map(str::trim).filter(|it| !it.is_empty()).position(|it| it == heading)?;
    let row = lines.find(|line| line.contains(id))?;
    row.split("  ").map(str::trim).filter(|it| !it.is_empty()).nth(at)
}

#[test]
fn top_at_any_controller_includes_the_counts_of_all_gateways_and_workers() {
    let up = RunningCluster::group(None, 2, &[]);
    up.apply_digits();
    let controllers: Vec<_> = up.parts().into_iter().filter_map(|part| part.controller).collect();
    let other = &controllers.last().unwrap().1;
    let mut look = String::new();
    // Send requests to another controller while `top` runs.
    eventually("a rate of requests", || {
        let mut top = millrace();
        top.args(["top", "--interval", "1s", "-e", other]).stdout(Stdio::piped());
        let top = top.spawn().unwrap();
        for _ in 0..3 {
            up.ok(&["invoke", "digits", "--image", &repository(IMAGE), "-e", &controllers[0].1]);
        }
        let output = top.wait_with_output().unwrap();
        assert!(output.status.success());
        look = String::from_utf8(output.stdout).unwrap();
        let rate = cell(&look, "Functions", "REQ/S", "default/digits");
        rate.is_some_and(|rate| rate != "0.0" && rate != "-")
            && ["FunctionReady", "3 of 3 controllers up", "2 of 2 nodes connected"]
                .iter()
                .all(|it| look.contains(it))
    });
    assert!(cell(&look, "Functions", "P98", "default/digits").unwrap().ends_with('s'), "{look}");
    // A worker ran the requests, over its link.
    let gpus = look.matches(" Up ").count();
    let links = look.matches(" pcie ").count();
    assert_eq!((gpus, links), (2, 2), "{look}");
}
