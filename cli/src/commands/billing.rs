//! `billing`: the usage and cost of tenants and functions.

use futures::TryStreamExt as _;
use millrace_client::messages as wire;
use millrace_types::FunctionName;

use crate::failure::CommandFailure;
use crate::output::bills::{Billing, Price};
use crate::output::{ListOutput, document, print};
use crate::session::ClusterSession;

const AFTER: &str = "\
A charge is GPU time: the time that answered requests ran on GPUs, each rounded up to a millisecond,
and a tenth of the time that functions were idle: ready in a node's host memory without a request on
a GPU. Deleted functions are still charged.

Examples:
  millrace billing                               the functions of this tenant
  millrace billing -A --price-per-gpu-hour 2.49  the functions of every tenant, with their cost
  millrace billing --function digits -o json";

/// Show the usage and cost of functions.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Show only this function.
    #[arg(short, long, value_name = "NAME")]
    function: Option<FunctionName>,
    /// Show the functions of every tenant.
    #[arg(short = 'A', long)]
    all_tenants: bool,
    /// The price of one GPU hour; adds the cost of each charge in the same currency.
    #[arg(long, value_name = "PRICE")]
    price_per_gpu_hour: Option<Price>,
    /// Read the answering controller's own state, which may be out of date; works while no
    /// controller leads.
    #[arg(long)]
    stale: bool,
    #[command(flatten)]
    output: ListOutput,
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    let admin = if args.stale { session.admin.clone().with_stale_reads() } else { session.admin.clone() };
    let tenant = (!args.all_tenants).then_some(&session.config.tenant);
    let bills: Vec<wire::Bill> = admin.billing(tenant, args.function.as_ref()).try_collect().await?;
    let billing = Billing::new(bills, args.price_per_gpu_hour);
    if let Some(text) = document(args.output.output, &billing)? {
        return print(&text);
    }
    if billing.is_empty() {
        let owner = match (&args.function, tenant) {
            (Some(function), Some(tenant)) => format!("function {function} of tenant {tenant}"),
            (Some(function), None) => format!("functions named {function}"),
            (None, Some(tenant)) => format!("tenant {tenant}"),
            (None, None) => "anyone".to_owned(),
        };
        let more = if args.all_tenants { "" } else { ": -A shows every tenant" };
        eprintln!(
            "no usage of {owner} is reported yet (workers report runs once per second, and idle time alone once per minute){more}"
        );
        return Ok(());
    }
    print(&billing.table().render(args.output.output))
}
