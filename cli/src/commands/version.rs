//! `version`: the versions of this client and of the cluster.

use millrace_client::messages::GetVersionResponse;
use serde::Serialize;

use crate::failure::CommandFailure;
use crate::output::{ListOutput, document, print};
use crate::session::ClusterSession;

/// Print the versions of this client and of the cluster.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print only this client's version, without calling a cluster.
    #[arg(long)]
    client: bool,
    #[command(flatten)]
    output: ListOutput,
}

#[derive(Serialize)]
struct Versions {
    client: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<Server>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Server {
    version: String,
    build: String,
    cluster_id: String,
    cluster_version: u64,
    api_versions: Vec<String>,
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    // Print the client's version even if the cluster does not answer.
    let answer = if args.client { Ok(None) } else { session.admin.version().await.map(Some) };
    let (server, failure) = match answer {
        Ok(server) => (server.map(Server::from), None),
        Err(error) => (None, Some(CommandFailure::from(error))),
    };
    let versions = Versions { client: millrace_proto::BUILD, server };
    match document(args.output.output, &versions)? {
        Some(text) => print(&text)?,
        None => print(&versions.text())?,
    }
    failure.map_or(Ok(()), Err)
}

impl Versions {
    fn text(&self) -> String {
        let mut text = format!("client   {}\n", self.client);
        if let Some(server) = &self.server {
            text += &format!("server   {} ({})\n", server.version, server.build);
            text += &format!("cluster  {}, version {}\n", server.cluster_id, server.cluster_version);
            text += &format!("apis     {}\n", server.api_versions.join(", "));
        }
        text
    }
}

impl From<GetVersionResponse> for Server {
    fn from(answer: GetVersionResponse) -> Self {
        Self {
            version: answer.version,
            build: answer.build,
            cluster_id: answer.cluster_id,
            cluster_version: answer.cluster_version,
            api_versions: answer.api_versions,
        }
    }
}
