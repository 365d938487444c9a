//! `cluster status`: every controller, as the answering controller sees it. Works without a
//! majority.

use millrace_client::messages as wire;

use crate::failure::CommandFailure;
use crate::output::table::{TextTable, col, wide};
use crate::output::{ListFormat, ListOutput, document, documents, print};
use crate::session::ClusterSession;

/// Show the group of controllers: the leader, unreachable controllers and replication lag.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    output: ListOutput,
}

pub(super) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    let status = session.admin.cluster_status().await?;
    let format = args.output.output;
    if let Some(text) = document(format, &documents::ClusterStatusDocument::from(status.clone()))? {
        return print(&text);
    }
    print(&format!("{}\n\n{}", summary(&status), table(&status).render(format)))?;
    // The wide table has these reasons in a column.
    let away = unreachable(&status).filter(|_| format != ListFormat::Wide);
    for warning in away.chain(status.warnings.iter().cloned()) {
        eprintln!("warning: {warning}");
    }
    Ok(())
}

/// Describes each unreachable controller with the reason.
fn unreachable(status: &wire::ClusterStatus) -> impl Iterator<Item = String> {
    let away = status.controllers.iter().filter(|it| !it.reachable && !it.unreachable_reason.is_empty());
    away.map(|it| format!("controller {} cannot be reached: {}", it.id, it.unreachable_reason))
}

/// Describes whether writes are accepted, and the leader.
fn summary(status: &wire::ClusterStatus) -> String {
    let id = &status.cluster_id;
    let voters = || status.controllers.iter().filter(|it| it.voter);
    let up = voters().filter(|it| it.reachable).count();
    let led = match (status.quorum, status.leader) {
        (true, leader) => format!("controller {leader} leads in term {}", status.term),
        (false, 0) => "no controller leads: writes are refused".to_owned(),
        (false, leader) => {
            format!(
                "controller {leader} leads in term {} without a majority: writes are refused",
                status.term
            )
        }
    };
    let changing = if status.changing { "; a change of the voters is in progress" } else { "" };
    format!("cluster {id}: {led}; {up} of {} voters are up{changing}", voters().count())
}

fn table(status: &wire::ClusterStatus) -> TextTable {
    let mut table = TextTable::new([
        col("ID"),
        col("ROLE"),
        col("VOTER"),
        col("STATUS"),
        col("CLIENTS"),
        col("INTERNAL"),
        col("LAG"),
        wide("TERM"),
        wide("LOG"),
        wide("APPLIED"),
        wide("SNAPSHOT"),
        wide("BUILD"),
        wide("DIRECTORY"),
        wide("REASON"),
    ]);
    for it in &status.controllers {
        // An unreachable controller reports no values.
        let said = |number: u64| if it.reachable { number.to_string() } else { String::new() };
        table.row([
            it.id.to_string(),
            documents::role(it).unwrap_or_default().to_owned(),
            if it.voter { "Yes" } else { "No" }.to_owned(),
            if it.reachable { "Up" } else { "Unreachable" }.to_owned(),
            it.client_address.clone(),
            it.internal_address.clone(),
            it.lag.map(|lag| lag.to_string()).unwrap_or_default(),
            said(it.term),
            said(it.last_log_index),
            said(it.last_applied_index),
            said(it.snapshot_index),
            it.build.clone(),
            it.directory.clone(),
            it.unreachable_reason.clone(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> wire::ClusterStatus {
        let controller = |id: u64, role: wire::ControllerRole| wire::Controller {
            id,
            role: role.into(),
            voter: true,
            reachable: role != wire::ControllerRole::Unspecified,
            internal_address: format!("h{id}:7070"),
            lag: Some(id - 1),
            ..Default::default()
        };
        let roles =
            [wire::ControllerRole::Leader, wire::ControllerRole::Follower, wire::ControllerRole::Unspecified];
        wire::ClusterStatus {
            cluster_id: "c".into(),
            leader: 1,
            term: 4,
            controllers: (1..).zip(roles).map(|(id, role)| controller(id, role)).collect(),
            quorum: true,
            ..Default::default()
        }
    }

    #[test]
    fn the_summary_says_whether_writes_are_accepted() {
        let text = |change: fn(&mut wire::ClusterStatus)| {
            let mut status = status();
            change(&mut status);
            summary(&status)
        };
        assert_eq!(text(|_| {}), "cluster c: controller 1 leads in term 4; 2 of 3 voters are up");
        let lost = text(|status| status.quorum = false);
        assert!(lost.contains("leads in term 4 without a majority: writes are refused"), "{lost}");
        let unled = text(|status| (status.quorum, status.leader, status.changing) = (false, 0, true));
        assert_eq!(
            unled,
            "cluster c: no controller leads: writes are refused; 2 of 3 voters are up; a change of the voters is in progress"
        );
    }

    #[test]
    fn values_of_an_unreachable_controller_are_left_blank() {
        let expected = "\
ID   ROLE       VOTER   STATUS        CLIENTS   INTERNAL   LAG
1    Leader     Yes     Up            -         h1:7070    0
2    Follower   Yes     Up            -         h2:7070    1
3    -          Yes     Unreachable   -         h3:7070    2
";
        assert_eq!(table(&status()).render(ListFormat::Table), expected);
    }

    #[test]
    fn reasons_are_in_the_wide_table_and_below_the_narrow_one() {
        let mut status = status();
        status.controllers[2].unreachable_reason = "connection refused".into();
        let wide = table(&status).render(ListFormat::Wide);
        assert!(wide.lines().next().unwrap().ends_with("   REASON"), "{wide}");
        let ends: Vec<_> = wide.lines().skip(1).map(|line| line.rsplit_once("   ").unwrap().1).collect();
        assert_eq!(ends, ["-", "-", "connection refused"]);
        let below: Vec<_> = unreachable(&status).collect();
        assert_eq!(below, ["controller 3 cannot be reached: connection refused"]);
    }
}
