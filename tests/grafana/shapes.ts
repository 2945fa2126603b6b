// Grafana's published types, as JSON can be checked against them: a string enum takes its values as plain strings.
import type { Dashboard as Whole, AnnotationQuery, DataQuery } from '@grafana/schema';
import type * as Bars from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type * as Heat from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';
import type * as Grid from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as Stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as Lines from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

type Plain<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;

// what the Prometheus data source reads of an annotation besides (@grafana/prometheus, annotations.ts)
type Query = DataQuery & { expr: string; interval: string };
type Mark = AnnotationQuery<Query> & { titleFormat: string; textFormat: string; tagKeys: string };
export type Dashboard = Plain<Omit<Whole, 'annotations'>> & { annotations: Plain<{ list: Mark[] }> };
// of each type of panel: its options, and the drawing settings of its fields
export interface Parts {
  timeseries: { options: Plain<Lines.Options>; custom: Plain<Lines.FieldConfig> };
  stat: { options: Plain<Partial<Stat.Options>>; custom: {} };
  bargauge: { options: Plain<Partial<Bars.Options>>; custom: {} };
  table: { options: Plain<Grid.Options>; custom: Plain<Partial<Grid.FieldConfig>> };
  heatmap: { options: Plain<Partial<Heat.Options>>; custom: Plain<Heat.FieldConfig> };
}
