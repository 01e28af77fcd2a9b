//! What the fuzz targets run, here so that tests can replay their corpora.

mod tp_plan;

pub use crate::header::fuzz_header as safetensors_header;
pub use tp_plan::tp_plan;
