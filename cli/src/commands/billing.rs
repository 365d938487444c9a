//! `billing`: what was used and what it costs, by tenant and function.

use futures::TryStreamExt as _;
use millrace_client::messages as wire;
use millrace_types::FunctionName;

use crate::failure::Failure;
use crate::output::bills::{Billing, Price};
use crate::output::{Output, document, print};
use crate::session::Session;

const AFTER: &str = "\
A charge is GPU time: all of the time that answered requests ran on GPUs, each rounded up to a
millisecond, and a tenth of the time that functions were idle, ready in a node's host memory with none
of their requests on a GPU. Deleted functions are still owed for.

Examples:
  millrace billing                               the functions of this tenant
  millrace billing -A --price-per-gpu-hour 2.49  of every tenant, and what that is in money
  millrace billing --function digits -o json";

/// Show what functions used and what it costs.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Only this function.
    #[arg(short, long, value_name = "NAME")]
    function: Option<FunctionName>,
    /// Functions of every tenant.
    #[arg(short = 'A', long)]
    all_tenants: bool,
    /// What an hour of a GPU costs: adds what that makes of each charge, in the same currency.
    #[arg(long, value_name = "PRICE")]
    price_per_gpu_hour: Option<Price>,
    /// What the controller that answers has, perhaps not the newest: also while none leads.
    #[arg(long)]
    stale: bool,
    #[command(flatten)]
    output: Output,
}

pub(crate) async fn run(args: Args, session: &Session) -> Result<(), Failure> {
    let admin = if args.stale { session.admin.clone().stale() } else { session.admin.clone() };
    let tenant = (!args.all_tenants).then_some(&session.config.tenant);
    let bills: Vec<wire::Bill> = admin.billing(tenant, args.function.as_ref()).try_collect().await?;
    let billing = Billing::new(bills, args.price_per_gpu_hour);
    if let Some(text) = document(args.output.output, &billing)? {
        return print(&text);
    }
    if billing.is_empty() {
        let whose = match (&args.function, tenant) {
            (Some(function), Some(tenant)) => format!("function {function} of tenant {tenant}"),
            (Some(function), None) => format!("functions named {function}"),
            (None, Some(tenant)) => format!("tenant {tenant}"),
            (None, None) => "anyone".to_owned(),
        };
        let more = if args.all_tenants { "" } else { ": with -A every tenant is shown" };
        eprintln!(
            "nothing was used by {whose} yet, as far as workers have told (runs once a second, idle time alone once a minute){more}"
        );
        return Ok(());
    }
    print(&billing.table().render(args.output.output))
}
