//! The reference path and the SonicMoE path agree, over random shapes and routings.
