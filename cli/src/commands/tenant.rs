//! `tenant set`: a tenant's caps on each node.

use std::num::NonZeroU32;

use millrace_types::{Quota, ResourceShare, TenantName};

use crate::failure::CommandFailure;
use crate::manifests::rules::try_tenant;
use crate::output::{print, tenants};
use crate::session::ClusterSession;

const EXAMPLES: &str = "\
Caps apply to each node separately. Requests beyond the caps wait; nothing is refused, except a model
that is larger than its tenant's share of the memory. All caps are set at once: a cap that is not
named is removed.

Examples:
  millrace tenant set acme --gpus-max 2                        at most two GPUs of a node at once
  millrace tenant set acme --gpu-share 0.5 --memory-share 0.5
  millrace tenant set acme --no-caps
  millrace get tenants
  millrace get tenants -o yaml                                 the same for 'millrace apply -f FILE'";

/// Set the caps of a tenant.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    Set(Set),
}

/// Set all caps of a tenant.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
struct Set {
    /// The tenant, which may have no function yet.
    #[arg(value_name = "NAME")]
    name: TenantName,
    /// The number of a node's GPUs that may work on the tenant's requests at once; a hard limit.
    #[arg(long, value_name = "N")]
    gpus_max: Option<NonZeroU32>,
    /// The share of a node's GPUs at once, and of their time in the last ten seconds, such as 0.5;
    /// exceeded only on GPUs that no other tenant within its share waits for or needed in the last
    /// ten seconds.
    #[arg(long, value_name = "SHARE")]
    gpu_share: Option<ResourceShare>,
    /// The share of a node's GPU memory that the models of the tenant's running requests may use; a
    /// hard limit.
    #[arg(long, value_name = "SHARE")]
    memory_share: Option<ResourceShare>,
    /// Remove every cap.
    #[arg(long, conflicts_with_all = ["gpus_max", "gpu_share", "memory_share"])]
    no_caps: bool,
    /// Check everything, change nothing.
    #[arg(long)]
    dry_run: bool,
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    let Verb::Set(Set { name, gpus_max, gpu_share, memory_share, no_caps, dry_run }) = args.verb;
    let quota = Quota { gpus_max, gpu_share, memory_share };
    if quota.is_none() && !no_caps {
        return Err(CommandFailure::usage("no cap is named")
            .hint("name --gpus-max, --gpu-share or --memory-share; or --no-caps to remove all caps"));
    }
    let (set, suffix) = match dry_run {
        true => (try_tenant(&name, &quota, &session.admin).await, " (dry run)"),
        false => (session.admin.set_tenant(&name, &quota).await.map_err(CommandFailure::from), ""),
    };
    let tenant = set.map_err(|failure| failure.about(format_args!("tenant/{name}")))?;
    print(&format!("tenant/{name} {}{suffix}", tenants::caps(&tenant)))
}
