//! The report of a run: one line per check, with its numbers, and one verdict. Reports are printed
//! as text, and written as files for a CI server and for a browser ([`ReportFolder`]).

mod chart;
mod check;
mod cluster_usage;
mod folder;
mod harness_usage;
mod html;
mod junit;
mod run_report;
mod series;

pub use self::check::{CheckVerdict, PromiseCheck};
pub use self::cluster_usage::{ClusterUsage, UsageSum};
pub use self::folder::ReportFolder;
pub use self::harness_usage::HarnessUsage;
pub use self::run_report::RunReport;
pub use self::series::{RequestSecond, RequestSeries};
