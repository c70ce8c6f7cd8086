// All terms, in the order of the lists that users see.
#pragma once
#include <variant>
#include "act.h"
#include "alibi.h"
#include "also.h"
#include "blend.h"
#include "dense.h"
#include "depth.h"
#include "documents.h"
#include "fixed.h"
#include "gate.h"
#include "gqa.h"
#include "gru.h"
#include "layers.h"
#include "lsh.h"
#include "memory.h"
#include "plain.h"
#include "qknorm.h"
#include "relative.h"
#include "relu2.h"
#include "reuse.h"
#include "reversible.h"
#include "rmsnorm.h"
#include "rope.h"
#include "route.h"
#include "router.h"
#include "share.h"
#include "silu.h"
#include "sinks.h"
#include "sla.h"
#include "softcap.h"
#include "strided.h"
#include "swiglu.h"
#include "topk.h"
#include "universal.h"
#include "untied.h"
#include "vres.h"
#include "window.h"

using WiringTerm = std::variant<PlainTerm, SlaTerm, AlsoTerm, ShareTerm, LayersTerm, GqaTerm, RouteTerm, VresTerm,
                                RouterTerm, DepthTerm, WindowTerm, StridedTerm, FixedTerm, TopkTerm, SinksTerm,
                                DocumentsTerm, ReuseTerm, BlendTerm, GateTerm, RopeTerm, RelativeTerm, AlibiTerm,
                                MemoryTerm, UniversalTerm, ActTerm, RmsnormTerm, QknormTerm, Relu2Term, SiluTerm,
                                SwigluTerm, UntiedTerm, SoftcapTerm, DenseTerm, GruTerm, LshTerm, ReversibleTerm>;
