//! A gateway with models that return their inputs: for trying clients, and for measuring the gateway alone.
//!
//! ```text
//! cargo run --release -p millrace-gateway --example echo_server [ADDRESS]
//! ```
//!
//! Prints `listening on ADDRESS` and serves until its standard input ends.

#[path = "../tests/front_door/echo.rs"]
#[allow(dead_code, unreachable_pub, clippy::unwrap_used, missing_docs, reason = "shared with the tests")]
mod echo;

use std::io::Read as _;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use millrace_gateway::{GatewayBuilder, GatewayConfig};
use tokio::net::TcpListener;

#[allow(clippy::disallowed_methods, reason = "the outermost shell: the clock is handed in from here")]
fn since_1970() -> Duration {
    std::time::SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:0".to_owned());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(&address).await?;
        let seed = u64::from(std::process::id());
        let config = GatewayConfig::new(Arc::new(since_1970), seed);
        let serving = GatewayBuilder::new(config, Arc::new(echo::Echo::new())).serve(listener)?;
        println!("listening on {}", serving.local_addr());
        let ended = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
        ended.await??;
        serving.close(Duration::from_secs(5)).await;
        Ok(())
    })
}
