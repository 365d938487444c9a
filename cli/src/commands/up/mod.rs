//! `up`: a cluster on this machine. With one controller, this process is the whole cluster except
//! for the executors. With more controllers, each controller and worker is a separate process that
//! this one watches.

mod args;
mod group;
mod single;

use millrace_proto::trace::SpanRing;

pub(crate) use self::args::Args;
pub(crate) use self::single::plan;
use crate::config::Config;
use crate::failure::CommandFailure;

pub(crate) async fn run(args: Args, config: &Config, spans: Option<SpanRing>) -> Result<(), CommandFailure> {
    let (data_dir, _kept) = args.data_dir()?;
    args.options.check_exposed(args.worker())?;
    match args.controllers.get() {
        1 => single::run(&args, config, data_dir, spans).await,
        _ => group::run(&args, config, data_dir).await,
    }
}
