//! What the fuzz targets run, one file for each, here so that tests can replay their corpora.

#![allow(missing_docs, missing_debug_implementations)]

mod attach_session;
mod frame_decoder;
mod input;
mod manifest;
mod message;
pub mod pair;
mod read_plan;
mod server_session;
mod words;

pub use attach_session::attach_session;
pub use frame_decoder::frame_decoder;
pub use input::Input;
pub use manifest::manifest;
pub use message::message;
pub use pair::pair;
pub use read_plan::read_plan;
pub use server_session::server_session;
