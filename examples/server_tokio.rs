//! An async inference server on axum, which changes to new weights on request and serves meanwhile.
//!
//! ```sh
//! weightd preload --model tests/data/llama --device cpu &    # wait for READY
//! cargo run -p weightd-examples --bin server_tokio -- --model tests/data/llama --port 8000
//! curl 'localhost:8000/generate?first=1&tokens=8'
//! curl -X POST localhost:8000/reload
//! curl localhost:8000/weights
//! ```

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use clap::Parser;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::RwLock;
use tokio::task::spawn_blocking;
use weightd_examples::{Bigram, Engine, end, log_to_stderr};
use weightd_tokio::{Loaded, Loader, Mode, Weights};

/// An async inference server, which changes to new weights on request and serves meanwhile.
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    engine: Engine,

    /// Where to listen, on 127.0.0.1; 0 takes any free port and prints it.
    #[arg(long, default_value_t = 8000)]
    port: u16,
}

/// What all requests share. A request keeps the weights that it began with, so a reload waits for nobody.
struct Server {
    loader: Loader,
    mode: Mode,
    weights: RwLock<Arc<Loaded<Bigram>>>,
}

#[tokio::main]
async fn main() -> ExitCode {
    log_to_stderr();
    end(run(Args::parse()).await)
}

async fn run(args: Args) -> Result<(), Box<dyn Error>> {
    let rank = args.engine.rank("stored")?;
    let loader = Loader::new(&args.engine.loader_config, &rank)?;
    let loaded = loader
        .load(Bigram::over, move |_because| Bigram::read(&rank.checkpoint))
        .await?;
    let server = Arc::new(Server {
        loader,
        mode: args.engine.loader_config.mode,
        weights: RwLock::new(Arc::new(loaded)),
    });
    let router = Router::new()
        .route("/generate", get(generate))
        .route("/weights", get(weights))
        .route("/reload", post(reload))
        .with_state(server);
    let listener = TcpListener::bind(("127.0.0.1", args.port)).await?;
    println!("listening on {}", listener.local_addr()?);
    let stop = async {
        let _ = tokio::signal::ctrl_c().await;
    };
    axum::serve(listener, router).with_graceful_shutdown(stop).await?;
    Ok(())
}

async fn generate(
    State(server): State<Arc<Server>>,
    Query(query): Query<HashMap<String, usize>>,
) -> Json<Value> {
    let weights = Arc::clone(&*server.weights.read().await);
    let first = query.get("first").copied().unwrap_or(1);
    let tokens = query.get("tokens").copied().unwrap_or(8).min(256);
    // Computing is work, so it is not done where others wait.
    let tokens = spawn_blocking(move || weights.model().generate(first, tokens)).await;
    Json(json!({ "tokens": tokens.unwrap_or_default() }))
}

/// Which weights are served, and how they came here: something to alert on.
async fn weights(State(server): State<Arc<Server>>) -> Json<Value> {
    let weights = server.weights.read().await;
    let path = match &**weights {
        Loaded::Mapped { .. } => "mapped",
        Loaded::Copied { .. } => "copied",
        Loaded::LoadedFromDisk { .. } => "disk",
    };
    Json(json!({
        "path": path,
        "generation": weights.generation().map(|generation| generation.to_string()),
        "because": weights.because().map(|because| because.to_string()),
        "daemon_lost": weights.lease().map(|lease| lease.is_lost()),
    }))
}

/// Changes to what the daemon serves now. Where that fails, what is served stays.
async fn reload(State(server): State<Arc<Server>>) -> Result<Json<Value>, (StatusCode, String)> {
    let current = Arc::clone(&*server.weights.read().await);
    // In copy mode the daemon lets go of what it holds once this is built. (An engine that cannot hold two
    // copies of its own overwrites the one that it has, and generates nothing meanwhile.)
    let copies = server.mode == Mode::Copy;
    let build = move |weights: Weights| match copies {
        true => Bigram::over(weights.duplicate()?),
        false => Bigram::over(weights),
    };
    let reloaded = server.loader.reload(current.generation(), build).await;
    let reloaded = reloaded.map_err(|error| (StatusCode::SERVICE_UNAVAILABLE, error.to_string()))?;
    let changed = reloaded.is_some();
    if let Some(loaded) = reloaded {
        let loaded = Arc::new(loaded);
        let old = std::mem::replace(&mut *server.weights.write().await, loaded);
        // They go with the last request that uses them, and freeing them takes its time.
        spawn_blocking(move || drop((old, current)));
    }
    Ok(Json(json!({ "changed": changed })))
}
