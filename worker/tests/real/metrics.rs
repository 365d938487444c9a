//! Tests of a real worker's metrics.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::support::{client, invoke, row, serving_mlp, within};

/// Returns the response to a scrape by HTTP/1.1, the protocol of Prometheus.
pub(crate) async fn scraped(address: SocketAddr) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: worker\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scrape_shows_the_effects_of_a_request() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    invoke(&mut client(&worker), "mlp", 1, &row(1)).await.unwrap();
    let answer = within("the metrics", scraped(worker.addr())).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("content-type: text/plain"), "{answer}");
    for line in [
        r#"millrace_gpu_up{gpu="0",gpu_type="test"} 1.0"#,
        r#"millrace_gpu_models{gpu="0"} 1.0"#,
        r#"millrace_gpu_swaps_total{gpu="0"} 1.0"#,
        r#"millrace_function_requests_total{tenant="default",function="mlp",outcome="completed"} 1.0"#,
        "millrace_dispatch_misses_total 1",
        "millrace_host_models 1.0",
    ] {
        assert!(answer.lines().any(|it| it == line), "{line} in {answer}");
    }
    worker.shutdown().await;
}
