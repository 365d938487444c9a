//! `delete`: removes functions, by name or those of a file, and forgets lost nodes.

use std::path::PathBuf;

use millrace_client::DeleteOptions;
use millrace_types::{FunctionKey, FunctionName, NodeName, Reason};

use crate::commands::apply::manifests;
use crate::commands::target::{Kind, Target};
use crate::failure::Failure;
use crate::output::print;
use crate::session::Session;

/// Delete functions and all their revisions, or forget nodes that are lost.
#[derive(Debug, clap::Args)]
#[command(override_usage = "millrace delete function NAME... | node NAME... | -f FILE...")]
pub(crate) struct Args {
    /// What to delete, such as function/digits or node/worker-1.
    #[arg(value_name = "TYPE[/NAME]", required_unless_present = "file", conflicts_with = "file")]
    target: Option<Target>,
    /// Names, where the type stands alone.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Delete the functions of these manifests, folders of them, or - for standard input.
    #[arg(short, long, value_name = "FILE")]
    file: Vec<PathBuf>,
    /// Check everything, delete nothing.
    #[arg(long)]
    dry_run: bool,
    /// What is not there is no failure.
    #[arg(long)]
    ignore_not_found: bool,
}

pub(crate) async fn run(args: Args, session: &Session) -> Result<(), Failure> {
    let Args { target, names, file, dry_run, ignore_not_found } = args;
    let keys = match target {
        Some(target) => {
            let kind = target.kind;
            let names = target.names(names)?;
            match kind {
                Kind::Function => keys(&names, session)?,
                Kind::Node if dry_run => {
                    return Err(Failure::usage("a node cannot be deleted as a trial")
                        .hint("leave --dry-run out: only one that is lost is forgotten"));
                }
                Kind::Node => return nodes(&names, ignore_not_found, session).await,
                Kind::Gpu => {
                    return Err(Failure::usage("GPUs go with their node").hint("millrace delete node NAME"));
                }
                Kind::Tenant => {
                    return Err(Failure::usage("a tenant is its functions and its caps")
                        .hint("delete the functions; for the caps: millrace tenant set NAME --no-caps"));
                }
                Kind::Scaling => {
                    return Err(Failure::usage("the scaling signal is computed, not kept")
                        .hint("look at it: millrace get scaling"));
                }
            }
        }
        None => {
            manifests::read(&file, &session.config.tenant)?.into_iter().map(|item| item.spec.key).collect()
        }
    };
    let suffix = if dry_run { " (dry run)" } else { "" };
    for key in keys {
        match session.admin.delete(&key, DeleteOptions { dry_run, resource_version: None }).await {
            Ok(()) => print(&format!("function/{} deleted{suffix}", key.name))?,
            Err(error) if ignore_not_found && error.reason() == Some(Reason::FunctionNotFound) => {}
            Err(error) => return Err(Failure::from(error).about(format_args!("function/{}", key.name))),
        }
    }
    Ok(())
}

fn keys(names: &[String], session: &Session) -> Result<Vec<FunctionKey>, Failure> {
    if names.is_empty() {
        return Err(Failure::usage("which function?").hint("name it: millrace delete function NAME"));
    }
    let key = |name: &String| {
        let name = FunctionName::new(name).map_err(|error| Failure::usage(error.to_string()))?;
        Ok(session.key(&name))
    };
    names.iter().map(key).collect()
}

/// Forgets nodes. Their names are free then.
async fn nodes(names: &[String], ignore_not_found: bool, session: &Session) -> Result<(), Failure> {
    if names.is_empty() {
        return Err(Failure::usage("which node?").hint("name it: millrace delete node NAME"));
    }
    for name in names {
        let name = NodeName::new(name).map_err(|error| Failure::usage(error.to_string()))?;
        match session.admin.remove_node(&name).await {
            Ok(()) => print(&format!("node/{name} deleted"))?,
            Err(error) if ignore_not_found && error.reason() == Some(Reason::NodeNotFound) => {}
            Err(error) => return Err(Failure::from(error).about(format_args!("node/{name}"))),
        }
    }
    Ok(())
}
