//! `delete`: removes functions, by name or those of a file.

use std::path::PathBuf;

use millrace_client::DeleteOptions;
use millrace_types::{FunctionKey, FunctionName, Reason};

use crate::commands::apply::manifests;
use crate::commands::target::{Kind, Target};
use crate::failure::Failure;
use crate::output::print;
use crate::session::Session;

/// Delete functions and all their revisions.
#[derive(Debug, clap::Args)]
#[command(override_usage = "millrace delete function NAME... | -f FILE...")]
pub(crate) struct Args {
    /// What to delete, such as function/digits.
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
    /// A function that is not there is no failure.
    #[arg(long)]
    ignore_not_found: bool,
}

pub(crate) async fn run(args: Args, session: &Session) -> Result<(), Failure> {
    let Args { target, names, file, dry_run, ignore_not_found } = args;
    let keys = match target {
        Some(target) => named(target, names, session)?,
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

fn named(target: Target, names: Vec<String>, session: &Session) -> Result<Vec<FunctionKey>, Failure> {
    if target.kind != Kind::Function {
        return Err(Failure::usage("only functions are deleted").hint("millrace delete function NAME"));
    }
    let names = target.names(names)?;
    if names.is_empty() {
        return Err(Failure::usage("which function?").hint("name it: millrace delete function NAME"));
    }
    let key = |name: &String| {
        let name = FunctionName::new(name).map_err(|error| Failure::usage(error.to_string()))?;
        Ok(session.key(&name))
    };
    names.iter().map(key).collect()
}
